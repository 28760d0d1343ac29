//! Git over HTTP: inspects pushes before they are forwarded, and queries upstream for the trees
//! that a push is compared with.

mod push_body;
pub(crate) mod receive;
pub(crate) mod upstream_trees;
