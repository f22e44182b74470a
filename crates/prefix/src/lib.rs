//! Radix tree, page ledger and chained block hashes, shared by the gateway index and the engine cache.
