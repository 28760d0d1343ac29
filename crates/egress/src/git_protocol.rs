//! Git's wire formats: pkt-lines, pushes, packs up to their end, reports and advertisements.
//! Nothing here touches a socket or decides anything.

pub mod advertisement;
pub mod ask;
pub mod intake;
pub mod line;
pub mod pack_end;
pub mod push;
pub mod report;
pub mod size;
