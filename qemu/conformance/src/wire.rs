// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is at the other end of the device's Ethernet link, and of the host's interface.

use crate::outcome::{failed, wait_for, watch, Outcome};
use crate::packet::Packet;
use ferrite_fabric::framing::{Reader, Writer, MAX_FRAME};
use ferrite_fabric::shortcut::is_message;
use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Frames on a socket.
pub struct Link {
    stream: UnixStream,
    reader: Reader,
    /// Whether the device may say first what it is.
    fresh: bool,
}

impl Link {
    fn new(stream: UnixStream) -> Outcome<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            reader: Reader::new(),
            fresh: true,
        })
    }

    /// The next frame that has come; those by which a device speaks to its switch are left out.
    pub fn look(&mut self) -> Outcome<Option<Vec<u8>>> {
        loop {
            if self.fresh {
                // What comes first may be a mark instead of a frame.
                self.fresh = self.reader.take_mark().is_none();
            }
            if !self.fresh {
                match self.reader.next_frame() {
                    Ok(Some(frame)) if is_message(frame) => continue,
                    Ok(Some(frame)) => return Ok(Some(frame.to_vec())),
                    Ok(None) => {}
                    Err(error) => return failed(format!("the link: {error}")),
                }
            }
            match self.reader.fill(&mut self.stream) {
                Ok(0) => return failed("the device closed its link"),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The next frame.
    pub fn receive(&mut self, what: &str) -> Outcome<Vec<u8>> {
        wait_for(what, || self.look())
    }

    /// Sends a frame.
    pub fn send(&mut self, frame: &[u8]) -> Outcome {
        let mut writer = Writer::new(2 * MAX_FRAME);
        if !writer.push(frame) {
            return failed("a check sends too long a frame");
        }
        wait_for("room on the link", || {
            Ok(writer.flush(&mut self.stream)?.then_some(()))
        })
    }
}

/// The device's Ethernet link: it connects where this listens.
pub struct Wire {
    path: PathBuf,
    listener: Option<UnixListener>,
    link: Option<Link>,
}

impl Wire {
    /// A wire that the device can be connected to.
    pub fn listen(path: &Path) -> Outcome<Self> {
        let mut wire = Self {
            path: path.to_owned(),
            listener: None,
            link: None,
        };
        wire.open()?;
        Ok(wire)
    }

    fn open(&mut self) -> Outcome {
        let _ = std::fs::remove_file(&self.path);
        let listener = UnixListener::bind(&self.path)?;
        listener.set_nonblocking(true)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// The link, once the device has connected.
    pub fn link(&mut self) -> Outcome<&mut Link> {
        if self.listener.is_none() {
            self.open()?;
        }
        if self.link.is_none() {
            let listener = &self.listener;
            let stream = wait_for("the device's end of the wire", || {
                match listener.as_ref().map(UnixListener::accept) {
                    Some(Ok((stream, _))) => Ok(Some(stream)),
                    _ => Ok(None),
                }
            })?;
            self.link = Some(Link::new(stream)?);
        }
        match &mut self.link {
            Some(link) => Ok(link),
            None => failed("no wire"),
        }
    }

    /// Pulls the cable; [`Self::link`] plugs it in again.
    pub fn pull(&mut self) {
        self.listener = None;
        self.link = None;
        let _ = std::fs::remove_file(&self.path);
    }

    /// Forgets what has come.
    pub fn drain(&mut self) -> Outcome {
        let link = self.link()?;
        while link.look()?.is_some() {}
        Ok(())
    }

    /// Sends a frame to the device.
    pub fn send(&mut self, frame: &[u8]) -> Outcome {
        self.link()?.send(frame)
    }

    /// The next RoCE packet, which must be well made.
    pub fn packet(&mut self) -> Outcome<Packet> {
        let link = self.link()?;
        wait_for("a packet", || look_for_packet(link))
    }

    /// No RoCE packet comes.
    pub fn silence(&mut self) -> Outcome {
        let link = self.link()?;
        watch("a packet that should not have been sent", || {
            look_for_packet(link)
        })
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.pull();
    }
}

fn look_for_packet(link: &mut Link) -> Outcome<Option<Packet>> {
    while let Some(frame) = link.look()? {
        match Packet::parse(&frame) {
            Some(Ok(packet)) => return Ok(Some(packet)),
            Some(Err(why)) => return failed(format!("a packet with {why}: {frame:02x?}")),
            None => {}
        }
    }
    Ok(None)
}

/// Connects to the socket of the host's own interface.
pub fn interface(path: &Path) -> Outcome<Link> {
    let stream = wait_for("the socket of the interface", || {
        Ok(UnixStream::connect(path).ok())
    })?;
    let mut link = Link::new(stream)?;
    // A device says nothing here but frames.
    link.fresh = false;
    Ok(link)
}

/// Somebody on the wire whom the device is connected to.
#[derive(Clone, Copy, Debug)]
pub struct Neighbour {
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Its address.
    pub gid: [u8; 16],
    /// Its queue pair.
    pub qpn: u32,
    /// The device's MAC address.
    pub device_mac: [u8; 6],
    /// The device's address.
    pub device_gid: [u8; 16],
    /// The device's queue pair.
    pub device_qpn: u32,
}

impl Neighbour {
    /// A packet from it to the device.
    pub fn packet(&self, opcode: u8, psn: u32, body: Vec<u8>) -> Packet {
        Packet {
            to_mac: self.device_mac,
            from_mac: self.mac,
            from: self.gid,
            to: self.device_gid,
            ..Packet::new(opcode, self.device_qpn, psn, body)
        }
    }
}
