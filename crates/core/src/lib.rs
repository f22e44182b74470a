//! Ids, closed error codes, clock and worker descriptions. No I/O.
