//! The coding tools.
