//! The exception family: every failure of the router is a `RouterError`.

use pyo3::create_exception;
use pyo3::exceptions::PyException;

create_exception!(branchline_router, RouterError, PyException, "A failure of the router.");
create_exception!(branchline_router, ConfigError, RouterError, "An option is wrong; one line a fault.");
create_exception!(
    branchline_router,
    StartError,
    RouterError,
    "The router can't start, for example for a port in use."
);
create_exception!(
    branchline_router,
    StateError,
    RouterError,
    "The router is not in the state for this call."
);
create_exception!(branchline_router, ForkError, RouterError, "The router was made in another process.");
