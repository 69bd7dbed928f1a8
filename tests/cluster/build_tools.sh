#!/usr/bin/env bash
# Builds the programs of the test cluster from Go modules: build_tools.sh DIR [PART ...]
#
# DIR gets one executable per program, and one stamp per part, so that a part is built again only
# when its module changed. Parts: etcd k8s helm cni coredns traefik crds (default: all). Two runs
# into one DIR wait for each other. Cold on two cores all parts take about 25 minutes; the API server
# tier needs etcd, k8s, helm and crds only.
set -euo pipefail

dir=$1
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(etcd k8s helm cni coredns traefik crds)
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/tools"
# Its module requires hundreds of others, which its CRDs don't need: it is no line of a go.mod.
KEDA=github.com/kedacore/keda/v2@v2.18.0
KEDA_SUM=h1:ttR223fii/4QJ0YvtrhcWHaEoezByb/t5CeFopjl6EI=
mkdir -p "$dir"
exec 9>"$dir/.lock"
flock 9

flags_of() {
    case $1 in
        k8s)
            local version=v1.36.3 package=k8s.io/component-base/version
            # The API server refuses a kubelet of an unknown version, and `kubectl version` prints it.
            echo "-s -w -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=36"
            ;;
        *) echo "-s -w" ;;
    esac
}

# Where a module lies; with a checksum as $2 it must have that one.
module_folder() {
    local told
    told=$(go mod download -json "$1")
    [ -z "${2:-}" ] || grep -q "\"Sum\": \"$2\"" <<<"$told" || {
        echo "$1 has another content than the one that was looked at" >&2
        return 1
    }
    sed -n 's/.*"Dir": "\(.*\)".*/\1/p' <<<"$told"
}

# The types of other projects that objects and the chart use: one folder for each project.
make_crds() {
    local new=$dir/.crds.new source name
    rm -rf "$new"
    mkdir -p "$new"/{gateway-api,keda,prometheus-operator}
    # In the version that this Traefik asks for.
    source=$(cd "$here/traefik" && module_folder sigs.k8s.io/gateway-api)
    cp "$source"/config/crd/standard/*.yaml "$new/gateway-api/"
    source=$(cd "$here/crds" && module_folder "$KEDA" "$KEDA_SUM")
    cp "$source/config/crd/bases/keda.sh_scaledobjects.yaml" "$new/keda/"
    # This project makes its files from its Go types, as is done here.
    (cd "$here/crds" && CGO_ENABLED=0 go tool controller-gen crd \
        paths=github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1 \
        "output:crd:dir=$new/all")
    mv "$new/all/monitoring.coreos.com_servicemonitors.yaml" "$new/prometheus-operator/"
    rm -r "$new/all"
    chmod -R u+w "$new"
    for name in "$new"/*; do
        rm -rf "$dir/${name##*/}"
        mv "$name" "$dir/"
    done
    rmdir "$new"
}

for part in "${parts[@]}"; do
    module=$here/$part
    stamp=$({ cat "$module"/go.*; [ "$part" != crds ] || { cat "$here"/traefik/go.*; echo "$KEDA"; }; } \
        | sha256sum | cut -c1-16)
    [ "$(cat "$dir/.$part" 2>/dev/null)" != "$stamp" ] || continue
    echo "building $part" >&2
    if [ "$part" = crds ]; then
        make_crds
        echo "$stamp" >"$dir/.$part"
        continue
    fi
    # Without cgo a binary needs no C library, so it also runs in an image made from nothing.
    # Go 1.27 reads JSON in another way, which breaks the API server's OpenAPI: see go.mod.
    (cd "$module" && CGO_ENABLED=0 go build -trimpath -ldflags "$(flags_of "$part")" -o "$dir/" tool)
    [ "$part" != etcd ] || mv "$dir/v3" "$dir/etcd" 2>/dev/null || mv "$dir/server" "$dir/etcd"
    echo "$stamp" >"$dir/.$part"
done
