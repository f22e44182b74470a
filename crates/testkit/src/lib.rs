//! Fakes for tests: a scripted HTTP worker and test clocks.
