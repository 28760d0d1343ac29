//! What every backend promises, of this one.

crate::suite::contract!(crate::bench::Bench::new());
