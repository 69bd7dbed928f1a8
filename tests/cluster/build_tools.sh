#!/usr/bin/env bash
# Builds the programs of the test cluster from Go modules: build_tools.sh DIR [PART ...]
#
# DIR gets one executable per program, and one stamp per part, so that a part is built again only
# when its module changed. Parts: etcd k8s helm cni coredns traefik (default: all). Two runs into
# one DIR wait for each other. Cold on two cores all parts take about 25 minutes; the API server
# tier needs etcd and k8s only.
set -euo pipefail

dir=$1
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(etcd k8s helm cni coredns traefik crds)
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/tools"
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

for part in "${parts[@]}"; do
    module=$here/$part
    # The Gateway API's types in the version that this Traefik asks for.
    [ "$part" != crds ] || module=$here/traefik
    stamp=$(cat "$module/go.mod" "$module/go.sum" | sha256sum | cut -c1-16)
    [ "$(cat "$dir/.$part" 2>/dev/null)" != "$stamp" ] || continue
    echo "building $part" >&2
    if [ "$part" = crds ]; then
        source=$(cd "$module" && go mod download -json sigs.k8s.io/gateway-api | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
        rm -rf "$dir/gateway-api"
        mkdir "$dir/gateway-api"
        cp "$source"/config/crd/standard/*.yaml "$dir/gateway-api/"
        chmod -R u+w "$dir/gateway-api"
        echo "$stamp" >"$dir/.$part"
        continue
    fi
    # Without cgo a binary needs no C library, so it also runs in an image made from nothing.
    # Go 1.27 reads JSON in another way, which breaks the API server's OpenAPI: see go.mod.
    (cd "$module" && CGO_ENABLED=0 go build -trimpath -ldflags "$(flags_of "$part")" -o "$dir/" tool)
    [ "$part" != etcd ] || mv "$dir/v3" "$dir/etcd" 2>/dev/null || mv "$dir/server" "$dir/etcd"
    echo "$stamp" >"$dir/.$part"
done
