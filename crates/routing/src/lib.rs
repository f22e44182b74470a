//! Routing policies and the cache index. Pure and sync: clock and randomness are passed in.
