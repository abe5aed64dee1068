// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--function`: what one function of several is, and what it has of what the adapter has.

use crate::{unicast, Model};
use clap::ValueEnum;
use ferrite_device::mapping::{Row, Vlans, MAX_FUNCTIONS};
use ferrite_engine::{Config, Numbers};
use ferrite_fabric::switch::Mac;
use std::path::PathBuf;

/// One `--function`.
#[derive(Clone, Debug)]
pub struct FunctionOptions {
    pub socket: PathBuf,
    pub net: Option<PathBuf>,
    pub mac: Mac,
    pub personality: Model,
    any_source_mac: bool,
    vlans: Option<Vec<u16>>,
    /// Of queue pairs, completion queues, shared receive queues and tags.
    shares: [Option<u32>; 4],
}

/// What of each kind a function may be told to have.
const SHARES: [&str; 4] = ["qps", "cqs", "srqs", "tags"];

fn number<T: TryFrom<u32>>(key: &str, value: &str, least: u32, most: u32) -> Result<T, String> {
    let number = value.parse().ok();
    let within = number.filter(|number| (least..=most).contains(number));
    within
        .and_then(|number| T::try_from(number).ok())
        .ok_or_else(|| format!("{key}={value}: a number from {least} to {most} is wanted"))
}

/// Reads `socket=PATH,mac=ADDRESS,...`.
pub fn parse(text: &str) -> Result<FunctionOptions, String> {
    let (mut socket, mut net, mut mac) = (None, None, None);
    let (mut personality, mut vlans) = (Model::Rdma, None);
    let mut any_source_mac = false;
    let mut shares = [None; 4];
    let mut seen = Vec::new();
    for part in text.split(',') {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        if seen.contains(&key) {
            return Err(format!("{key} is there twice"));
        }
        seen.push(key);
        match key {
            "socket" if !value.is_empty() => socket = Some(PathBuf::from(value)),
            "net" if !value.is_empty() => net = Some(PathBuf::from(value)),
            "mac" => mac = Some(unicast(value)?),
            "personality" => personality = Model::from_str(value, false)?,
            "any-source-mac" if part == key => any_source_mac = true,
            "vlans" => {
                let list = value.split('+').map(|vlan| number(key, vlan, 0, 4094));
                vlans = Some(list.collect::<Result<_, _>>()?);
            }
            _ => match SHARES.iter().position(|share| *share == key) {
                Some(place) => shares[place] = Some(number(key, value, 1, u32::MAX)?),
                None => return Err(format!("'{part}' is nothing that a function has")),
            },
        }
    }
    Ok(FunctionOptions {
        socket: socket.ok_or("socket=PATH is missing")?,
        net,
        mac: mac.ok_or("mac=ADDRESS is missing: it is what tells functions apart")?,
        personality,
        any_source_mac,
        vlans,
        shares,
    })
}

/// Divides numbers among functions: each has what it is told, and those that are not told have as
/// many each of what is left. No number is of two.
fn divide(what: &str, all: Numbers, wanted: &[Option<u32>]) -> Result<Vec<Numbers>, String> {
    let told: u64 = wanted.iter().flatten().map(|count| u64::from(*count)).sum();
    let others = wanted.iter().filter(|count| count.is_none()).count() as u32;
    let left = u64::from(all.count).saturating_sub(told) as u32;
    let each = left.checked_div(others).unwrap_or(0);
    if told > u64::from(all.count) || others > 0 && each == 0 {
        return Err(format!(
            "--function: there are {} {what} for all functions together",
            all.count
        ));
    }
    let mut first = all.first;
    let shares = wanted.iter().map(|count| {
        let count = count.unwrap_or(each);
        let numbers = Numbers { first, count };
        first += count;
        numbers
    });
    Ok(shares.collect())
}

/// The rows of these functions in the table, and their configurations; `whole` has the numbers of
/// all together, and what is the same for each.
pub fn split(
    whole: &Config,
    functions: &[FunctionOptions],
) -> Result<(Vec<Row>, Vec<Config>), String> {
    if functions.len() > MAX_FUNCTIONS {
        return Err(format!("--function: there are {MAX_FUNCTIONS} at most"));
    }
    let kinds = [whole.qps, whole.cqs, whole.srqs, whole.tags];
    let mut shares = Vec::new();
    for (place, (what, all)) in SHARES.into_iter().zip(kinds).enumerate() {
        let wanted: Vec<_> = functions
            .iter()
            .map(|function| function.shares[place])
            .collect();
        shares.push(divide(what, all, &wanted)?);
    }
    let rows = functions.iter().map(|function| Row {
        mac: function.mac,
        any_source: function.any_source_mac,
        vlans: match &function.vlans {
            Some(vlans) => Vlans::only(vlans.iter().copied()),
            None => Vlans::all(),
        },
    });
    let configs = functions.iter().enumerate().map(|(number, function)| {
        let of_address = Config::new(function.mac.0, whole.messages);
        Config {
            number: number as u8,
            personality: function.personality.into(),
            any_source: function.any_source_mac,
            qps: shares[0][number],
            cqs: shares[1][number],
            srqs: shares[2][number],
            tags: shares[3][number],
            mac: of_address.mac,
            guid: of_address.guid,
            ..whole.clone()
        }
    });
    Ok((rows.collect(), configs.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_says_what_a_function_is() {
        let one = parse("socket=/run/a,mac=52:54:00:fe:00:01").unwrap();
        assert_eq!(one.socket, PathBuf::from("/run/a"));
        assert!(one.personality == Model::Rdma && !one.any_source_mac);
        let all = "socket=a,mac=52:54:00:fe:00:02,personality=network,net=n,any-source-mac,\
                   vlans=0+7,qps=100,tags=5000";
        let all = parse(all).unwrap();
        assert!(all.personality == Model::Network && all.any_source_mac);
        assert_eq!(all.vlans, Some(vec![0, 7]));
        assert_eq!(all.shares, [Some(100), None, None, Some(5000)]);
        for bad in [
            "",
            "socket=a",
            "mac=52:54:00:fe:00:01",
            "socket=a,mac=ff:ff:ff:ff:ff:ff",
            "socket=a,mac=52:54:00:fe:00:01,mac=52:54:00:fe:00:02",
            "socket=a,mac=52:54:00:fe:00:01,personality=none",
            "socket=a,mac=52:54:00:fe:00:01,vlans=4095",
            "socket=a,mac=52:54:00:fe:00:01,vlans=",
            "socket=a,mac=52:54:00:fe:00:01,qps=0",
            "socket=a,mac=52:54:00:fe:00:01,colour=red",
            "socket=a,mac=52:54:00:fe:00:01,any-source-mac=1",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_are_of_one_function_each() {
        let all = Numbers {
            first: 16,
            count: 1000,
        };
        let shares = divide("qps", all, &[None, Some(400), None]).unwrap();
        let of = |numbers: &Numbers| (numbers.first, numbers.count);
        let found: Vec<_> = shares.iter().map(of).collect();
        assert_eq!(found, [(16, 300), (316, 400), (716, 300)]);
        assert!(divide("qps", all, &[Some(1000), None]).is_err());
        assert!(divide("qps", all, &[Some(600), Some(401)]).is_err());
        assert!(divide("qps", all, &[Some(u32::MAX), Some(u32::MAX)]).is_err());
        assert!(divide("qps", all, &[Some(600), Some(400)]).is_ok());
    }
}
