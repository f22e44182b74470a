//! The branchline._native module: prefix cache, page ledger and text automaton.
