//! Failures of workers as ours. Codes map one to one; transport failures are `UpstreamFailed`.

use std::time::Duration;

use branchline_core::{Error, ErrorCode};
use prost::Message as _;
use tonic::{Code, Status};

use crate::proto;

/// The contract's code for each of ours that has one.
const CODES: [(proto::ErrorCode, ErrorCode); 9] = [
    (proto::ErrorCode::InvalidArgument, ErrorCode::InvalidArgument),
    (proto::ErrorCode::NotFound, ErrorCode::NotFound),
    (proto::ErrorCode::Unauthenticated, ErrorCode::Unauthenticated),
    (proto::ErrorCode::ResourceExhausted, ErrorCode::ResourceExhausted),
    (proto::ErrorCode::Unavailable, ErrorCode::Unavailable),
    (proto::ErrorCode::DeadlineExceeded, ErrorCode::DeadlineExceeded),
    (proto::ErrorCode::Unimplemented, ErrorCode::Unimplemented),
    (proto::ErrorCode::Internal, ErrorCode::Internal),
    (proto::ErrorCode::Cancelled, ErrorCode::Cancelled),
];

/// An engine's refusal or failure of one request. An unknown code is `UpstreamFailed`.
pub fn error_from_proto(error: proto::Error) -> Error {
    let known = CODES.iter().find(|(theirs, _)| *theirs as i32 == error.code);
    let code = known.map_or(ErrorCode::UpstreamFailed, |(_, ours)| *ours);
    Error {
        code,
        message: error.message,
        field: (!error.field.is_empty()).then_some(error.field),
        retry_after: error.retry_after_ms.map(|ms| Duration::from_millis(ms.into())),
    }
}

/// The contract's form of one of our errors; codes it lacks become `INTERNAL`.
pub fn error_to_proto(error: &Error) -> proto::Error {
    let known = CODES.iter().find(|(_, ours)| *ours == error.code);
    proto::Error {
        code: known.map_or(proto::ErrorCode::Internal, |(theirs, _)| *theirs).into(),
        message: error.message.clone(),
        field: error.field.clone().unwrap_or_default(),
        retry_after_ms: error.retry_after.map(|after| u32::try_from(after.as_millis()).unwrap_or(u32::MAX)),
    }
}

/// Trailing metadata in which an engine puts the contract's `Error` of a failed call.
const ERROR_KEY: &str = "branchline-error-bin";

/// A failed call. What the worker says of the arguments is passed on; the rest is its failure, not the client's.
///
/// The contract's own error in the trailing metadata, with its field and wait, comes before the bare status.
pub fn error_from_status(worker: &str, call: &str, status: &Status) -> Error {
    if let Some(error) = detail(status) {
        // A credential that is wrong is this gateway's.
        let code =
            if error.code == ErrorCode::Unauthenticated { ErrorCode::UpstreamFailed } else { error.code };
        return Error {
            code,
            message: format!("worker {worker} refused {call}: {}", error.message),
            ..error
        };
    }
    let code = match status.code() {
        Code::InvalidArgument => ErrorCode::InvalidArgument,
        Code::NotFound => ErrorCode::NotFound,
        Code::ResourceExhausted => ErrorCode::ResourceExhausted,
        Code::DeadlineExceeded => ErrorCode::DeadlineExceeded,
        Code::Unimplemented => ErrorCode::Unimplemented,
        _ => ErrorCode::UpstreamFailed,
    };
    Error::new(code, format!("worker {worker} failed {call}: {:?}: {}", status.code(), status.message()))
}

/// The contract's error that a status carries, if it can be read.
fn detail(status: &Status) -> Option<Error> {
    let bytes = status.metadata().get_bin(ERROR_KEY)?.to_bytes().ok()?;
    proto::Error::decode(bytes).ok().map(error_from_proto)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::metadata::{MetadataMap, MetadataValue};

    fn refused(error: &proto::Error) -> Status {
        let mut metadata = MetadataMap::new();
        metadata.insert_bin(ERROR_KEY, MetadataValue::from_bytes(&error.encode_to_vec()));
        Status::with_metadata(Code::Unknown, "bare", metadata)
    }

    #[test]
    fn the_contracts_error_in_the_metadata_comes_before_the_bare_status() {
        let code = proto::ErrorCode::ResourceExhausted.into();
        let message = "the queue is full".to_owned();
        let sent = proto::Error { code, message, field: "rid".into(), retry_after_ms: Some(1500) };
        let error = error_from_status("grpc://a:1", "FlushCache", &refused(&sent));
        assert_eq!((error.code, error.field.as_deref()), (ErrorCode::ResourceExhausted, Some("rid")));
        assert_eq!(error.retry_after, Some(Duration::from_millis(1500)));
        assert_eq!(error.message, "worker grpc://a:1 refused FlushCache: the queue is full");
    }

    #[test]
    fn a_refused_credential_in_the_metadata_is_not_the_clients_fault_either() {
        let sent = proto::Error { code: proto::ErrorCode::Unauthenticated.into(), ..Default::default() };
        assert_eq!(error_from_status("w", "GetLoad", &refused(&sent)).code, ErrorCode::UpstreamFailed);
    }

    #[test]
    fn metadata_that_is_no_error_leaves_the_bare_status() {
        let mut metadata = MetadataMap::new();
        metadata.insert_bin(ERROR_KEY, MetadataValue::from_bytes(b"\xff\xff"));
        let status = Status::with_metadata(Code::NotFound, "no such thing", metadata);
        let error = error_from_status("w", "Abort", &status);
        assert_eq!(error.code, ErrorCode::NotFound);
        assert!(error.message.contains("no such thing"), "{error}");
    }

    #[test]
    fn every_code_of_the_contract_survives_the_round_trip() {
        for number in 1..=9 {
            let sent = proto::Error {
                code: number,
                message: "temperature is -1".into(),
                field: "sampling.temperature".into(),
                retry_after_ms: Some(1500),
            };
            let ours = error_from_proto(sent.clone());
            assert_ne!(ours.code, ErrorCode::UpstreamFailed, "code {number} is not mapped");
            assert_eq!(error_to_proto(&ours), sent);
        }
    }

    #[test]
    fn the_contract_has_no_code_beyond_the_table() {
        assert!(proto::ErrorCode::try_from(CODES.len() as i32 + 1).is_err());
    }

    #[test]
    fn an_unknown_code_blames_the_worker() {
        let error = error_from_proto(proto::Error { code: 99, ..Default::default() });
        assert_eq!(error.code, ErrorCode::UpstreamFailed);
        assert_eq!((error.field, error.retry_after), (None, None));
    }

    #[test]
    fn a_refused_credential_of_the_gateway_is_not_the_clients_fault() {
        let error = error_from_status("grpc://a:1", "GetLoad", &Status::unauthenticated("no token"));
        assert_eq!(error.code, ErrorCode::UpstreamFailed);
        assert!(
            error.message.contains("grpc://a:1") && error.message.contains("no token"),
            "{}",
            error.message
        );
    }
}
