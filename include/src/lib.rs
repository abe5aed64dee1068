// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The Ferrite device interface, written once
