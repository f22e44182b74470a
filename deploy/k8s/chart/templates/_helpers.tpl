{{- define "branchline.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{ end }}{{ end }}
{{- end }}

{{- define "branchline.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "branchline.labels" -}}
{{ include "branchline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Labels of pods: nothing that a new chart changes, or each upgrade would roll them all. */}}
{{- define "branchline.podLabels" -}}
{{ include "branchline.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "branchline.image" -}}
{{- $image := index . 0 }}{{- $chart := index . 1 -}}
{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default $chart.AppVersion $image.tag }}{{ end }}
{{- end }}

{{- /* Flat options as TOML: JSON's scalars and lists are TOML's. */}}
{{- define "branchline.toml" -}}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}

{{- define "branchline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "branchline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "branchline.grace" -}}
{{- $sum := add .preStopSeconds .drainSeconds .marginSeconds }}
{{- if kindIs "invalid" .terminationGracePeriodSeconds }}{{ $sum }}{{ else }}{{ int .terminationGracePeriodSeconds }}{{ end }}
{{- end }}

{{- define "branchline.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (printf "%s-gateway" (include "branchline.fullname" .)) .Values.serviceAccount.name }}
{{- else }}{{ required "serviceAccount.name: is empty while serviceAccount.create is false; name an account" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "branchline.keysSecret" -}}
{{ default (printf "%s-keys" (include "branchline.fullname" .)) .Values.auth.existingSecret }}
{{- end }}

{{- define "branchline.tokenSecret" -}}
{{ default (printf "%s-worker-token" (include "branchline.fullname" .)) .Values.workerToken.existingSecret }}
{{- end }}

{{- define "branchline.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}{{ default (printf "%s-tls" (include "branchline.fullname" .)) .Values.tls.secretName }}
{{- else }}{{ .Values.tls.secretName }}{{ end }}
{{- end }}

{{- /* The pools with what they leave out, as JSON: {"pools": [...]}. */}}
{{- define "branchline.pools" -}}
{{- $pools := list }}
{{- range .Values.pools }}
{{- $pools = append $pools (mergeOverwrite (deepCopy $.Values.poolDefaults) (deepCopy .)) }}
{{- end }}
{{- dict "pools" $pools | toJson }}
{{- end }}

{{- define "branchline.poolName" -}}
{{ include "branchline.fullname" (index . 0) }}-{{ (index . 1).name }}
{{- end }}

{{- /* What the gateway's file holds: the operator's rows and those that follow from other values. */}}
{{- define "branchline.gatewayOptions" -}}
{{- $full := include "branchline.fullname" . }}
{{- $set := dict "drain-timeout" (printf "%ds" (int .Values.gateway.drainSeconds)) "port" 8080 "admin-port" 8081 "prometheus-port" 9090 }}
{{- if .Values.auth.insecure }}{{ $_ := set $set "insecure" true }}
{{- else }}{{ $_ := set $set "api-key-file" "/etc/branchline/keys/keys" }}{{ end }}
{{- if include "branchline.tlsSecret" . }}
{{- $_ := set $set "tls-cert-path" "/etc/branchline/tls/tls.crt" }}
{{- $_ := set $set "tls-key-path" "/etc/branchline/tls/tls.key" }}
{{- end }}
{{- with .Values.discovery.workers }}{{ $_ := set $set "worker-urls" . }}{{ end }}
{{- if eq .Values.discovery.kind "dns" }}
{{- $names := list }}
{{- range (fromJson (include "branchline.pools" .)).pools }}
{{- $names = append $names (printf "grpc+dns://%s-%s.%s.svc:9000" $full .name $.Release.Namespace) }}
{{- end }}
{{- with $names }}{{ $_ := set $set "worker-dns" . }}{{ end }}
{{- end }}
{{- if eq .Values.discovery.kind "kubernetes" }}
{{- $roles := dict }}
{{- range (fromJson (include "branchline.pools" .)).pools }}{{ $_ := set $roles .role true }}{{ end }}
{{- range $role, $option := dict "regular" "selector" "prefill" "prefill-selector" "decode" "decode-selector" }}
{{- if hasKey $roles $role }}
{{- $_ := set $set $option (list (printf "branchline.dev/fleet=%s" $full) (printf "branchline.dev/role=%s" $role)) }}
{{- end }}
{{- end }}
{{- $_ := set $set "service-discovery" true }}
{{- $_ := set $set "service-discovery-port" 9000 }}
{{- $_ := set $set "service-discovery-namespace" $.Release.Namespace }}
{{- $_ := set $set "service-discovery-protocol" "grpc" }}
{{- end }}
{{- if .Values.wasm.enabled }}{{ $_ := set $set "wasm-dir" "/var/lib/branchline/wasm" }}{{ end }}
{{- $rows := mergeOverwrite (dict "log-json" true "max-concurrent-requests" 512) (deepCopy .Values.gateway.options) $set }}
{{- include "branchline.toml" $rows }}
{{- end }}
