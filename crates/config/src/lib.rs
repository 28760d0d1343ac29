//! The operator's files: schema, strict parsing, layers, and the Settings snapshot.
