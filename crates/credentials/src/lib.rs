//! Credentials that the gate adds to requests.
//!
//! [`table`] lists which host receives which credential and how a request carries it; [`values`]
//! reads the values from the operator's environment, files and commands; [`placeholder`] makes the
//! texts that a sandbox holds instead; [`substitution`] writes a value into a request; [`redaction`]
//! removes values from responses and placeholders from bodies.
//!
//! **Never here:** sending a request, or deciding about one. A request gets a credential only in the
//! credentials stage of the pipeline (`egress`), after policy and inspection. A value is a
//! [`Secret`](config::Secret) from the moment it is read; no function here returns it in an
//! error, and each new value is reported to the log redactor before its first use.

mod builtin;
pub mod placeholder;
pub mod redaction;
pub mod service;
pub mod source;
pub mod substitution;
pub mod table;
pub mod values;
