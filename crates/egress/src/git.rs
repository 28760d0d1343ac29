//! Git over HTTP: pushes that are read before they leave, and what upstream has to compare them
//! with.

mod arriving;
pub(crate) mod receive;
pub(crate) mod upstream;
