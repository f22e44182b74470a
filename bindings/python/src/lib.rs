//! Python bindings of the gateway.
