// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Ferrite RNIC engine, without I/O of its own
