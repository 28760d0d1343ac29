//! Requests that wait for an operator's answer, between a client and a real origin.

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
