//! Git wire formats: pkt-lines, pushes, pack ends, push reports and ref advertisements. No
//! sockets and no decisions here.

pub mod advertisement;
pub mod pack_end;
pub mod pkt_line;
pub mod protocol_v2;
pub mod push;
pub mod push_spooler;
pub mod report;
pub mod size;
