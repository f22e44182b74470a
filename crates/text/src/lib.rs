//! Tokenising, chat templates, incremental detokenising and the stop automaton. Pure.
