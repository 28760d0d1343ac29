//! Held requests: the gate asks the operator for approval (a question) and holds the request
//! until the answer. Clients and origins are on loopback.

mod answers;
mod breakers;
mod cancellations;
mod dns_names;
mod fixture;
mod grants;
mod operator;
mod passthrough;
mod pushes;
mod rechecks;
mod reloads;
mod tokens;
mod uploads;
