{{/* What the pods of all services share. Each is a template of (dict "root" $ "component" … "own" its values);
`together` are components that are spread over nodes as one, and with `holds` it is a host of a worker's ranks. */}}

{{- define "millrace.podMetadata" -}}
labels:
  {{- include "millrace.labels" (list .root .component) | nindent 2 }}
  {{- with .role }}
  millrace.dev/role: {{ . }}
  {{- end }}
  {{- with .own.generation }}
  {{- if ne . "base" }}
  millrace.dev/generation: {{ . }}
  {{- end }}
  {{- end }}
  {{- with .own.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/keys: {{ include (print .root.Template.BasePath "/secret.yaml") .root | sha256sum }}
  {{- with .own.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Before the containers: who runs it, where, and how long it may take to leave. */}}
{{- define "millrace.podFrame" -}}
serviceAccountName: {{ include "millrace.fullname" .root }}{{ with .account }}-{{ . }}{{ end }}
automountServiceAccountToken: {{ hasKey . "account" }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "millrace.grace" (list .root .own.settings .component) }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 0
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.topologySpread }}
{{- if .enabled }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ .topologyKey }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      {{- if $.together }}
      {{- include "millrace.selectors" (list $.root $.together) | nindent 6 }}
      {{- else }}
      matchLabels:
        {{- include "millrace.selector" (list $.root $.component) | nindent 8 }}
      {{- end }}
    {{- if not (or $.together (eq $.component "kvcache")) }}
    matchLabelKeys: [pod-template-hash]
    {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of the container: image, rights, how it leaves, what it may use. */}}
{{- define "millrace.containerFrame" -}}
image: {{ include "millrace.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- if not .holds }}
lifecycle:
  {{- include "millrace.lifecycle" . | nindent 2 }}
{{- end }}
resources:
  {{- toYaml .own.resources | nindent 2 }}
{{- end }}

{{/* Where it is, by the downward API, and the key among services. */}}
{{- define "millrace.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: MILLRACE_CLUSTER_KEY
  valueFrom: {secretKeyRef: {name: {{ include "millrace.keySecret" .root }}, key: cluster-key}}
{{- if and .root.Values.model.tokenSecret.name (ne .component "kvcache") }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .root.Values.model.tokenSecret.name }}, key: {{ .root.Values.model.tokenSecret.key }}}}
{{- end }}
{{- with .own.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "millrace.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if .root.Values.grpcTls.secretName }}
- {name: grpc-tls, mountPath: /grpc-tls, readOnly: true}
{{- end }}
{{- if ne .component "kvcache" }}
{{- if .root.Values.model.volume }}
- {name: model, mountPath: {{ .root.Values.model.mountPath }}, readOnly: true}
{{- end }}
{{- if include "millrace.hub" .root }}
- {name: hub, mountPath: /var/lib/huggingface}
{{- end }}
{{- end }}
{{- with .own.shmSize }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- with .own.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "millrace.volumes" -}}
- {name: tmp, emptyDir: {}}
- {name: cache, emptyDir: {}}
{{- with .root.Values.grpcTls.secretName }}
- {name: grpc-tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- if ne .component "kvcache" }}
{{- with .root.Values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if include "millrace.hub" .root }}
- name: hub
  {{- toYaml .root.Values.model.hubVolume | nindent 2 }}
{{- end }}
{{- end }}
{{- with .own.shmSize }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
{{- end }}
{{- with .own.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of workers and pool nodes, by their status port. Slow answers are no reason to restart or leave out a busy one. */}}
{{- define "millrace.statusProbes" -}}
startupProbe:
  httpGet: {path: /health, port: status}
  periodSeconds: {{ .Values.startup.periodSeconds }}
  failureThreshold: {{ .Values.startup.failureThreshold }}
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: /health, port: status}
  periodSeconds: 1
  failureThreshold: 1
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /live, port: status}
  periodSeconds: 5
  failureThreshold: 6
  timeoutSeconds: 5
{{- end }}
