//! The Branchline gateway: HTTP side and composition root.
