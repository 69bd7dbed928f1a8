// Package crds names the Go types that controller-gen makes CRDs of: their project keeps the files
// in a module of its own. Nothing is compiled of it.
package crds

import _ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
