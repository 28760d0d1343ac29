//! The backend contract for the namespace backend.

crate::suite::contract!(crate::fixture::NamespaceFixture::new());
