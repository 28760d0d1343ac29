//! SQLite: registry and audit; the only SQL.
