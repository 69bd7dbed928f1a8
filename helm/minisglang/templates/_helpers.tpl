{{/* Name of the release's objects, at most 63 characters. */}}
{{- define "minisglang.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains "minisglang" .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-minisglang" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "minisglang.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "minisglang.selector" . }}
{{- end }}

{{/* The component tells the operator's pods from those of objects. */}}
{{- define "minisglang.selector" -}}
app.kubernetes.io/name: minisglang-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "minisglang.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "minisglang.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name must name an existing ServiceAccount when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "minisglang.operatorImage" -}}
{{ .Values.operator.image.repository }}:{{ default .Chart.AppVersion .Values.operator.image.tag }}
{{- end }}

{{/* What the operator may do where its objects live. Each verb is one that it uses. */}}
{{- define "minisglang.rules" -}}
- apiGroups: [minisglang.io]
  resources: [minisglangs]
  verbs: [list, watch]
- apiGroups: [minisglang.io]
  resources: [minisglangs/status]
  verbs: [patch]
# An owner reference with blockOwnerDeletion needs this.
- apiGroups: [minisglang.io]
  resources: [minisglangs/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments, statefulsets, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
# By name alone: it can list no Secret.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list, watch]
- apiGroups: [networking.k8s.io]
  resources: [ingresses, networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}

{{/* The operator's configuration: fields of minisgl_operator.observed.Settings. */}}
{{- define "minisglang.config" -}}
image: {{ default (printf "ghcr.io/minisglang/minisglang-engine-{device}:%s" .Chart.AppVersion) .Values.defaults.image | quote }}
redisImage: {{ .Values.defaults.redisImage | quote }}
gpuResourceName: {{ .Values.defaults.gpuResourceName | quote }}
runtimeClassName: {{ .Values.defaults.runtimeClassName | quote }}
nodeCidrs: {{ toJson .Values.networkPolicy.nodeCIDRs }}
canReadNodes: {{ and .Values.rbac.nodes (not .Values.watchNamespaces) }}
{{- end }}
