// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The requirements that no check is made of, each with the reason.

/// Why nothing of several functions is checked.
const OF_SEVERAL: &str = "a host has one function, and cannot tell what others do from what the wire \
                          does; the device in `qemu/` is checked with several hosts by tests of its own";

/// Number and reason.
pub const REASONS: &[(&str, &str)] = &[
    (
        "DEV-1-27",
        "over vfio-user the client has the MSI-X table, and masks and keeps pending itself",
    ),
    (
        "DEV-1-32",
        "vfio-user has no bus whose attributes could be seen; the order itself is chapter 13's",
    ),
    (
        "DEV-3-5",
        "whether a command was copied yet is a matter of time that a host cannot see: the same \
         doorbell is right or fatal by it",
    ),
    (
        "DEV-3-7",
        "no time is named, and a slow device cannot be told from one that does too much at once",
    ),
    (
        "DEV-3-34",
        "a device need not run out of room, and says nowhere when it does; DEV-3-132 has the one \
         bound that is told",
    ),
    (
        "DEV-4-86",
        "RoCE carries packets out in order only, so that no entry is touched and still valid",
    ),
    (
        "DEV-4-88",
        "RoCE carries packets out in order only, so that none is placed ahead of others",
    ),
    (
        "DEV-5-53",
        "whose turn it is in the device is not seen from outside; when packets leave depends on \
         more than that",
    ),
    (
        "DEV-5-54",
        "that two times end at once cannot be brought about from outside",
    ),
    (
        "DEV-5-55",
        "memory errors and management are the device's own: no host brings one about",
    ),
    (
        "DEV-5-56",
        "management is the device's own: no host brings it about",
    ),
    (
        "DEV-8-12",
        "takes a host that writes between two reads of the device, which cannot be told from one \
         that writes before or after both",
    ),
    (
        "DEV-12-38",
        "how much room there is within the device cannot be seen or brought about from outside",
    ),
    (
        "DEV-12-74",
        "how many answers a device can queue is told nowhere, and more reads than IRD are refused \
         first",
    ),
    (
        "DEV-13-1",
        "half a word that was seen would prove the contrary, none seen proves nothing; DEV-5-2 and \
         DEV-6-6 look for one",
    ),
    (
        "DEV-20-7",
        "whose turn it is in the device is not seen from outside, and no time is named",
    ),
    ("DEV-22-1", OF_SEVERAL),
    ("DEV-22-2", OF_SEVERAL),
    ("DEV-22-3", OF_SEVERAL),
    ("DEV-22-4", OF_SEVERAL),
    ("DEV-22-5", OF_SEVERAL),
    ("DEV-22-6", OF_SEVERAL),
    ("DEV-22-7", OF_SEVERAL),
    ("DEV-22-8", OF_SEVERAL),
    ("DEV-22-9", OF_SEVERAL),
    ("DEV-22-10", OF_SEVERAL),
    ("DEV-22-11", OF_SEVERAL),
    ("DEV-22-12", OF_SEVERAL),
    ("DEV-22-13", OF_SEVERAL),
    ("DEV-22-14", OF_SEVERAL),
    ("DEV-22-15", OF_SEVERAL),
    ("DEV-22-16", OF_SEVERAL),
    ("DEV-22-17", OF_SEVERAL),
];
