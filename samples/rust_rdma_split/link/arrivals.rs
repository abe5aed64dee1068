// SPDX-License-Identifier: GPL-2.0

//! How often hosts come, all of them and those from one address.

use super::steps::Pace;
use core::net::IpAddr;
use kernel::prelude::*;

/// Why nobody is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// There is no place for anybody, or too many have come.
    ForAll,
    /// There is none for that address.
    ForOne,
}

/// Somebody who has come lately.
struct Source {
    address: IpAddr,
    pace: Pace,
}

/// Each host that comes takes RTNL and much else, and again when it goes: so there is a pace for all. Who comes without end
/// would use that up for everybody; so there is one for each address as well.
pub(super) struct Arrivals {
    all: Pace,
    /// With room for all who can have come so lately that it matters.
    lately: KVec<Source>,
}

impl Arrivals {
    /// More cannot have come since the first of them that has to be remembered.
    const MOST: u64 = Pace::HOSTS.most_within(Pace::HOSTS_OF_ONE.memory());

    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            all: Pace::HOSTS,
            lately: KVec::with_capacity(Self::MOST as usize, GFP_KERNEL)?,
        })
    }

    /// Somebody comes, at that time (milliseconds).
    pub(super) fn admit(&mut self, address: IpAddr, now: u64) -> Result<(), Full> {
        let found = self.lately.iter_mut().find(|one| one.address == address);
        let known = match &found {
            Some(one) => one.pace,
            None => Pace::HOSTS_OF_ONE,
        };
        if known.wait(now) != 0 {
            return Err(Full::ForOne);
        }
        if self.all.wait(now) != 0 {
            return Err(Full::ForAll);
        }
        let mut pace = known;
        pace.answered(now);
        match found {
            Some(one) => one.pace = pace,
            None => {
                self.lately.retain(|one| !one.pace.is_rested(now));
                let new = Source { address, pace };
                let is_noted = self.lately.push_within_capacity(new).is_ok();
                // There is room for all; should there be none, nobody comes who could not be counted.
                if !is_noted {
                    return Err(Full::ForAll);
                }
            }
        }
        self.all.answered(now);
        Ok(())
    }
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_arrivals)]
mod tests {
    use super::*;
    use core::net::Ipv4Addr;

    fn address(number: u32) -> IpAddr {
        Ipv4Addr::from(0x0a00_0000 + number).into()
    }

    #[test]
    fn who_comes_without_end_leaves_room_for_others() -> Result {
        let mut arrivals = Arrivals::new()?;
        let (one, other) = (address(1), address(2));
        for _ in 0..32 {
            assert_eq!(arrivals.admit(one, 1000), Ok(()));
        }
        for _ in 0..100 {
            assert_eq!(arrivals.admit(one, 1000), Err(Full::ForOne));
        }
        // What was refused has taken nothing from others.
        for _ in 0..32 {
            assert_eq!(arrivals.admit(other, 1000), Ok(()));
        }
        assert_eq!(arrivals.admit(address(3), 1000), Err(Full::ForAll));
        // In ten seconds two of five in a second are his who tries all the time, and the rest is for others.
        let mut came = [0; 2];
        for now in 1001..=11_000 {
            for (who, from) in [one, address(4 + now as u32)].into_iter().enumerate() {
                came[who] += u32::from(arrivals.admit(from, now).is_ok());
            }
        }
        assert_eq!(came, [20, 30]);
        Ok(())
    }

    #[test]
    fn all_are_remembered_who_have_to_be_and_no_others() -> Result {
        let mut arrivals = Arrivals::new()?;
        let time = 4 * Pace::HOSTS_OF_ONE.memory();
        for now in (0..time).step_by(10) {
            // Each time another, as often as anybody is let in.
            let from = address(now as u32);
            assert_ne!(arrivals.admit(from, now), Err(Full::ForOne));
        }
        assert!(arrivals.lately.len() as u64 <= Arrivals::MOST);
        // Those who are rested are forgotten when another comes.
        assert_eq!(arrivals.admit(address(1), 2 * time), Ok(()));
        assert_eq!(arrivals.lately.len(), 1);
        Ok(())
    }
}
