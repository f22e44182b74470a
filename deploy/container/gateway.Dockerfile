# The gateway, by itself. From the repository's root:
#   docker build -f deploy/container/gateway.Dockerfile -t branchline/gateway:0.1.0 .
# FEATURES="" leaves out middleware and discovery in Kubernetes, which take long to build.
ARG RUST=1.95
FROM rust:${RUST}-slim-bookworm AS build
ARG FEATURES="branchline-gateway/whole"
WORKDIR /src
COPY Cargo.toml Cargo.lock rust-toolchain.toml ./
COPY crates crates
COPY gateway gateway
COPY bindings bindings
COPY engine/native engine/native
COPY proto proto
COPY examples/middleware examples/middleware
RUN cargo build --release --locked -p branchline-gateway --features "${FEATURES}" \
 && strip -o /branchline-router target/release/branchline-router

FROM debian:bookworm-slim
# Certificates are wanted as new as they come.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /branchline-router /usr/local/bin/branchline-router
COPY LICENSE THIRD_PARTY_NOTICES.md /usr/share/doc/branchline/
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080 8081 9090
ENTRYPOINT ["branchline-router"]
CMD ["--host=0.0.0.0", "--port=8080"]
