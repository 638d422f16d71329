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

{{/* Of the pods of several components: (list $ (list "moe" "moe-host-1")). */}}
{{- define "millrace.selectors" -}}
{{- $root := index . 0 -}}
matchLabels:
  app.kubernetes.io/name: {{ $root.Chart.Name }}
  app.kubernetes.io/instance: {{ $root.Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: {{ index . 1 | toJson }}}
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
{{ toYaml $group }}
{{- end }}

{{/* Of a worker whose ranks are on several hosts, all is as it can be: (list $ group). */}}
{{- define "millrace.checkHosts" -}}
{{- $root := index . 0 -}}
{{- $own := index . 1 -}}
{{- $hosts := int $own.hosts -}}
{{- if gt $hosts 1 -}}
{{- $ranks := int (get $own.settings "data_parallel_size" | default 1) -}}
{{- if or (ne 0 (mod $ranks $hosts)) (ne "true" (get $own.settings "enable_expert_parallel" | toJson)) -}}
{{- fail (printf "workers: %s: hosts: %d: each has as many ranks, which hold experts: settings need enable_expert_parallel: true and a data_parallel_size that is a multiple of hosts" $own.name $hosts) -}}
{{- end -}}
{{- if or (get $own.settings "enable_eplb") (ne "cpu" (get $own.settings "device" | default "cpu" | toString)) -}}
{{- fail (printf "workers: %s: hosts: %d: ranks on several hosts compute on CPUs, and move no experts between them: settings have neither another device nor enable_eplb" $own.name $hosts) -}}
{{- end -}}
{{- if or (gt (int $own.replicas) 1) $own.autoscaling.enabled $root.Values.autoscaler.enabled -}}
{{- fail (printf "workers: %s: hosts: %d: they join one worker, which has replicas: 1 and no autoscaling; more workers are groups of their own" $own.name $hosts) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* How many ranks of a worker each of its hosts has. */}}
{{- define "millrace.ranksHere" -}}
{{- div (int .settings.data_parallel_size) (int .hosts) -}}
{{- end }}

{{/* The names of the hosts of a group beside its worker's own, as a YAML list. */}}
{{- define "millrace.hosts" -}}
{{- $own := . }}
{{- range $number := untilStep 1 (int .hosts) 1 }}
- {{ printf "%s-host-%d" $own.name $number }}
{{- end }}
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
{{- $own = mergeOverwrite $own (dict "name" $name "generation" $generation "image" $image "model" $model) -}}
{{- include "millrace.checkHosts" (list $ $own) -}}
{{- range prepend (include "millrace.hosts" $own | fromYamlArray) $name }}
{{- if gt (len .) 20 }}
{{- fail (printf "workers: %s: a host of it would be called %s, and pods' names have room for 20 letters of that" $name .) -}}
{{- end }}
{{- if has . $names }}
{{- fail (printf "workers: two groups are called %s: a group is a Deployment of its name; call one of them something else" .) -}}
{{- end }}
{{- $names = append $names . }}
{{- end }}
- {{ $own | toJson }}
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
{{- add $root.Values.lifecycle.preStopSeconds (include "millrace.drain" (index . 1) | int) $root.Values.lifecycle.afterSeconds (ternary 20 0 (eq (index . 2) "kvcache")) -}}
{{- end }}

{{- define "millrace.drain" -}}
{{- $drain := 120 -}}
{{- if hasKey . "shutdown_timeout" }}{{ $drain = .shutdown_timeout }}{{ end -}}
{{- ceil $drain -}}
{{- end }}

{{/* Of a pod: how it leaves. */}}
{{- define "millrace.lifecycle" -}}
{{- $lifecycle := .root.Values.lifecycle -}}
{{- $seconds := int $lifecycle.preStopSeconds -}}
{{- $form := $lifecycle.preStopForm -}}
{{- if eq $form "auto" -}}
{{- $form = ternary "sleep" "exec" (semverCompare ">=1.30-0" .root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
preStop:
{{- if eq $form "sleep" }}
  sleep: {seconds: {{ $seconds }}}
{{- else }}
  exec: {command: ["sleep", {{ $seconds | toString | quote }}]}
{{- end }}
{{- end }}

{{/* The settings of a host of ranks, as flags: (list $ settings). Told to leave it stays until its worker has gone, for
which that has its preStop too, and joins no other. */}}
{{- define "millrace.hostFlags" -}}
{{- $root := index . 0 -}}
{{- $settings := index . 1 -}}
{{- $stays := add $root.Values.lifecycle.preStopSeconds (include "millrace.drain" $settings | int) -}}
{{- include "millrace.flags" (mergeOverwrite (deepCopy $settings) (dict "shutdown_timeout" $stays)) -}}
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
