{{- /* Where a pod goes: root, values of the workload, component. */}}
{{- define "branchline.placing" -}}
{{- $root := index . 0 }}{{- $it := index . 1 }}{{- $component := index . 2 -}}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $it.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $it.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $it.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $it.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $it.topologySpread }}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "branchline.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $component }}
        {{- if ne $component "gateway" }}
        branchline.dev/pool: {{ $it.name }}
        {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "branchline.wasmMounts" -}}
- {name: wasm-script, mountPath: /etc/branchline/wasm, readOnly: true}
- {name: wasm-modules, mountPath: /modules, readOnly: true}
{{- end }}

{{- define "branchline.wasmVolumes" -}}
- {name: wasm-script, configMap: {name: {{ include "branchline.fullname" . }}-wasm}}
{{- if .Values.wasm.volume.claim }}
- {name: wasm-modules, persistentVolumeClaim: {claimName: {{ .Values.wasm.volume.claim }}, readOnly: true}}
{{- else }}
- {name: wasm-modules, image: {reference: {{ .Values.wasm.volume.image }}, pullPolicy: IfNotPresent}}
{{- end }}
{{- end }}
