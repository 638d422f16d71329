{{/*
What a component has to do, as a query of Prometheus whose value is divided by the target of one replica. (dict "root" $
"component" … "role" … "own" its values). Every router tells of all workers: of what they tell of one, the largest
counts, once. Without series the load is 0; docs/deploy-kubernetes.md has an alert for that.
*/}}
{{- define "millrace.load" -}}
{{- $prefix := .root.Values.router.settings.metrics_prefix | default "millrace" -}}
{{- $name := include "millrace.fullname" .root -}}
{{- $from := printf "namespace=\"%s\",job=\"%s\"" .root.Release.Namespace $name -}}
{{- $engine := printf "%s,engine=~\"%s-%s-[a-z0-9]+-[a-z0-9]+\"" $from $name .component -}}
{{- if eq .role "router" -}}
sum({{ $prefix }}:router_queue_requests{ {{- $from -}} }) or vector(0)
{{- else if eq .role "prefill" -}}
{{- $rate := required (printf "workers: %s: autoscaling: tokensPerSecond: prompt tokens that one worker computes in a second; measure it" .component) .own.autoscaling.tokensPerSecond -}}
((sum({{ $prefix }}:router_prompt_tokens_waiting{ {{- $from -}} }) or vector(0)) + (sum(max by (engine) ({{ $prefix }}:worker_prompt_tokens_waiting{ {{- $engine -}} })) or vector(0))) / {{ toJson $rate }}
{{- else -}}
sum(max by (engine) ({{ $prefix }}:worker_kv_cache_usage_perc{ {{- $engine -}} })) or vector(0)
{{- end -}}
{{- end }}

{{/* What one replica may have of it: requests, seconds, or a share of its KV. */}}
{{- define "millrace.target" -}}
{{- $given := .own.autoscaling.target -}}
{{- if kindIs "invalid" $given -}}{{ ternary 1.5 0.8 (eq .role "prefill") }}{{- else -}}{{ toJson $given }}{{- end -}}
{{- end }}

{{- define "millrace.behavior" -}}
{{- range $way, $step := dict "scaleUp" .Values.autoscaling.up "scaleDown" .Values.autoscaling.down }}
{{ $way }}:
  stabilizationWindowSeconds: {{ ternary 0 $step.seconds (eq $way "scaleUp") }}
  policies:
    - {type: Pods, value: {{ $step.pods }}, periodSeconds: {{ $step.seconds }}}
{{- end }}
{{- end }}

{{/* All that scales, as a YAML list of {component, role, load, target, min, max}. */}}
{{- define "millrace.scaled" -}}
{{- $all := list (dict "root" . "component" "router" "role" "router" "own" .Values.router) -}}
{{- range $own := include "millrace.workers" . | fromYamlArray -}}
{{- $all = append $all (dict "root" $ "component" $own.name "role" $own.role "own" $own) -}}
{{- end -}}
{{- range $all }}
{{- if .own.autoscaling.enabled }}
- component: {{ .component }}
  load: {{ include "millrace.load" . | quote }}
  target: {{ include "millrace.target" . | quote }}
  min: {{ .own.autoscaling.minReplicas }}
  max: {{ .own.autoscaling.maxReplicas }}
{{- end }}
{{- end }}
{{- end }}
