//! Engine stubs, gRPC and HTTP worker clients, registry and health.
