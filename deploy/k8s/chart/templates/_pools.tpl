{{- define "branchline.hubEnv" -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: {{ ternary "/tmp/hub" "/models/hub" (eq .cache.kind "none") }}}
{{- with .hubTokenSecret }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
{{- end }}
{{- end }}

{{- define "branchline.claim" -}}
accessModes: [{{ .accessMode }}]
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}
