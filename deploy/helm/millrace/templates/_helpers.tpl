{{/* Names, labels, flags and times that several objects share. */}}

{{- define "millrace.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- /* With a group of at most 20 letters, the names of its pods are not cut off. */ -}}
{{- trunc 24 $name | replace "." "-" | trimSuffix "-" -}}
{{- end }}

{{/* Of a component: (list $ "router"). */}}
{{- define "millrace.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "millrace.labels" -}}
{{- $root := index . 0 -}}
{{ include "millrace.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{- define "millrace.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag }}{{- end -}}
{{- end -}}
{{- end }}

{{/* A group of workers with its defaults, as YAML: (list $ group). */}}
{{- define "millrace.group" -}}
{{- $root := index . 0 -}}
{{- $group := mergeOverwrite (deepCopy $root.Values.workerDefaults) (index . 1) -}}
{{- if gt (int $group.hosts) 1 -}}
{{- fail (printf "workers: %s: hosts: %d: the ranks of a worker are processes of one pod; no worker spans several hosts yet" $group.name (int $group.hosts)) -}}
{{- end -}}
{{ toYaml $group }}
{{- end }}

{{/* The groups of workers of every generation as a YAML list: each with its defaults, what its generation changes, the
image and the model, and a name of its own. Those of `base` are called as in the values, others prefill-NAME. */}}
{{- define "millrace.workers" -}}
{{- $names := list -}}
{{- range $generation, $changed := .Values.generations }}
{{- if ne (toString (get ($changed | default dict) "enabled")) "false" }}
{{- $changed = $changed | default dict -}}
{{- $image := mergeOverwrite (deepCopy $.Values.image) (deepCopy ($changed.image | default dict)) -}}
{{- if and (hasKey ($changed.image | default dict) "tag") (not (hasKey $changed.image "digest")) }}
{{- $_ := set $image "digest" "" -}}
{{- end }}
{{- $model := mergeOverwrite (deepCopy $.Values.model) (deepCopy ($changed.model | default dict)) -}}
{{- range $.Values.workers }}
{{- $own := include "millrace.group" (list $ .) | fromYaml -}}
{{- $changes := mergeOverwrite (dict "settings" (deepCopy ($changed.settings | default dict))) (deepCopy (get ($changed.workers | default dict) .name | default dict)) -}}
{{- $own = mergeOverwrite $own $changes -}}
{{- $name := ternary .name (printf "%s-%s" .name $generation) (eq $generation "base") -}}
{{- if gt (len $name) 20 }}
{{- fail (printf "generations: %s: the group would be called %s, and pods' names have room for 20 letters of that" $generation $name) -}}
{{- end }}
{{- if has $name $names }}
{{- fail (printf "workers: two groups are called %s: a group is a Deployment of its name; call one of them something else" $name) -}}
{{- end }}
{{- $names = append $names $name }}
- {{ mergeOverwrite $own (dict "name" $name "generation" $generation "image" $image "model" $model) | toJson }}
{{- end }}
{{- end }}
{{- end }}
{{- if not $names }}
{{- fail "generations: none is left: without workers there is nothing to serve with" -}}
{{- end }}
{{- end }}

{{/* Settings as flags of the command, one YAML list item each. `$(NAME)` in them is no variable of the pod, for which
Kubernetes makes one dollar of two. */}}
{{- define "millrace.flags" -}}
{{- range $name, $value := . }}
{{- $flag := replace "_" "-" $name }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $flag | quote }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $flag (join "," $value) | replace "$" "$$" | quote }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $flag $value | replace "$" "$$" | quote }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" $flag (toJson $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of every service: where the certificates of its gRPC are. They are read anew when the Secret changes. */}}
{{- define "millrace.grpcTlsFlags" -}}
{{- with .Values.grpcTls }}
{{- if .secretName }}
- "--grpc-tls-certfile=/grpc-tls/tls.crt"
- "--grpc-tls-keyfile=/grpc-tls/tls.key"
- "--grpc-tls-ca=/grpc-tls/ca.crt"
{{- with .serverName }}
- {{ printf "--grpc-tls-server-name=%s" . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Seconds a pod has to leave: (list $ settings component). 120 is the command's own default; after its drain a node of
the pool writes to disk for up to 20 s. */}}
{{- define "millrace.grace" -}}
{{- $root := index . 0 -}}
{{- $settings := index . 1 -}}
{{- $drain := 120 -}}
{{- if hasKey $settings "shutdown_timeout" }}{{ $drain = $settings.shutdown_timeout }}{{ end -}}
{{- add $root.Values.lifecycle.preStopSeconds (ceil $drain) $root.Values.lifecycle.afterSeconds (ternary 20 0 (eq (index . 2) "kvcache")) -}}
{{- end }}

{{- define "millrace.lifecycle" -}}
{{- $form := .Values.lifecycle.preStopForm -}}
{{- if eq $form "auto" -}}
{{- $form = ternary "sleep" "exec" (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
preStop:
{{- if eq $form "sleep" }}
  sleep: {seconds: {{ .Values.lifecycle.preStopSeconds }}}
{{- else }}
  exec: {command: ["sleep", {{ .Values.lifecycle.preStopSeconds | toString | quote }}]}
{{- end }}
{{- end }}

{{- define "millrace.keySecret" -}}
{{- if .Values.keys.cluster -}}{{ include "millrace.fullname" . }}-keys{{- else -}}{{ .Values.keys.existingSecret }}{{- end -}}
{{- end }}

{{/* host:port of every router: each pod of the headless Service is one. */}}
{{- define "millrace.routers" -}}
dns:{{ include "millrace.fullname" . }}-routers.{{ .Release.Namespace }}.svc:8100
{{- end }}

{{/* The name of the model where it is fetched from the hub, else nothing. */}}
{{- define "millrace.hub" -}}
{{- $name := .Values.model.name -}}
{{- if and $name (not (hasPrefix "/" $name)) -}}{{ $name }}{{- end -}}
{{- end }}

{{- define "millrace.scheme" -}}
{{- ternary "HTTPS" "HTTP" (ne .Values.tls.secretName "") -}}
{{- end }}
