//! SIGINT and SIGTERM: the first asks for a drain, the second ends the process at once.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The two stop signals of one process.
pub struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    /// Takes the signals over from the default handlers.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// The next of either.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
