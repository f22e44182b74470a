//! An engine's own word of whether it can serve, by gRPC's standard health service: it can't while no step ends, or while
//! it drains. Nothing running is touched; only new requests go elsewhere.

use std::time::Duration;

use tonic::Code;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::Token;
use crate::worker::Worker;

/// The generated client with the token put on each call.
pub(super) type Vitals = HealthClient<InterceptedService<Channel, Token>>;

pub(super) fn client(channel: Channel, token: Token) -> Vitals {
    HealthClient::with_interceptor(channel, token)
}

/// Time between two attempts to follow.
const AGAIN: Duration = Duration::from_secs(1);

/// Follows for as long as it is polled. An engine without such a service can always serve.
pub(super) async fn follow(worker: &Worker, mut vitals: Vitals) -> std::convert::Infallible {
    loop {
        match vitals.watch(HealthCheckRequest { service: String::new() }).await {
            Ok(answer) => {
                let mut news = answer.into_inner();
                while let Ok(Some(told)) = news.message().await {
                    match told.status() {
                        ServingStatus::Serving => worker.status.set_ready(),
                        ServingStatus::NotServing => {
                            worker.status.set_down("the engine says that it can't serve now");
                        }
                        // It does not know itself.
                        ServingStatus::Unknown | ServingStatus::ServiceUnknown => {}
                    }
                }
            }
            Err(status) if matches!(status.code(), Code::Unimplemented | Code::NotFound) => {
                return std::future::pending().await;
            }
            // Whether the connection is lost is for others to see.
            Err(_) => {}
        }
        tokio::time::sleep(AGAIN).await;
    }
}
