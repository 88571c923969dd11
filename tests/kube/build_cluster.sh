#!/usr/bin/env bash
# Fills a folder with a real Kubernetes control plane and its etcd: Debian's source of Kubernetes 1.20, built by Debian's
# Go. Five minutes on two cores, once. Installs nothing: packages are unpacked beside the source and removed with it.
set -euo pipefail
into=${1:?"usage: build_cluster.sh FOLDER"}
parts=(kube-apiserver kube-controller-manager kube-scheduler)
mkdir -p "$into"
into=$(cd "$into" && pwd)
work=$into/work
mkdir -p "$work"/apt/{lists/partial,cache/archives/partial,etc} "$work/debs" "$work/system"
cd "$work"

# A package state of its own, with sources; the machine's own is left alone.
for list in /etc/apt/sources.list.d/*.sources; do
    [ -e "$list" ] && sed 's/^Types: deb$/Types: deb deb-src/' "$list" >"apt/etc/$(basename "$list")"
done
if [ -s /etc/apt/sources.list ]; then
    sed -n 's/^deb \(.*\)/deb \1\ndeb-src \1/p' /etc/apt/sources.list >apt/etc/main.list
fi
apt=(-o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache" -o "Dir::Etc::sourceparts=$work/apt/etc"
    -o Dir::Etc::sourcelist=/dev/null -o "APT::Sandbox::User=$(id -un)" -qq)
if [ ! -e system/usr/bin/etcd ]; then
    apt-get "${apt[@]}" update
    (cd debs && apt-get "${apt[@]}" download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev \
        etcd-server kubernetes-client)
    for deb in debs/*.deb; do dpkg -x "$deb" system; done
fi
if [ ! -d src ]; then
    apt-get "${apt[@]}" source --download-only kubernetes
    dpkg-source --no-check -x kubernetes_1.20*.dsc src.new >/dev/null
    mv src.new src
fi

cd src
# The reflect2 that comes with the source crashes the API server under this Go, at the first custom object.
reflect2=vendor/github.com/modern-go/reflect2
rm -f "$reflect2"/*.go "$reflect2"/*.s
cp "$work"/system/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} "$reflect2/"
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
export GOROOT=$work/system/usr/lib/go-1.19 GOPATH=$work/src/.go GOCACHE=$work/gocache HOME=$work
export GO111MODULE=off GOPROXY=off GOTOOLCHAIN=local CGO_ENABLED=0 GOFLAGS=-p=2
# Debian keeps half of Go's tree elsewhere and links to it.
for part in api misc src test; do
    [ -e "$GOROOT/$part" ] || ln -sfn "$work/system/usr/share/go-1.19/$part" "$GOROOT/$part"
done
go=$GOROOT/bin/go
cd "$GOPATH/src/k8s.io/kubernetes"
own=k8s.io/kubernetes
if [ ! -f pkg/generated/openapi/zz_generated.openapi.go ]; then # the one generated file that Debian's source lacks
    "$go" build -o "$work/openapi-gen" "$own/vendor/k8s.io/kube-openapi/cmd/openapi-gen"
    folders=$(grep -rlE '\+k8s:openapi-gen=' --include='*.go' cmd pkg plugin staging/src/k8s.io |
        grep -vE '_test.go|/code-generator/|/sample-apiserver/|/testdata/' | xargs -n1 dirname | sort -u |
        sed -E "s#^staging/src/#vendor/#; s#^#$own/#" | paste -sd,)
    "$work/openapi-gen" -i "$folders" -p "$own/pkg/generated/openapi" -O zz_generated.openapi \
        -h hack/boilerplate/boilerplate.generatego.txt -r "$work/violations.txt" --output-base "$GOPATH/src"
fi
version=$own/vendor/k8s.io/component-base/version
for part in "${parts[@]}"; do
    "$go" build -trimpath -tags providerless -o "$work/$part" \
        -ldflags "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20" "$own/cmd/$part"
done
cd "$into"
install "$work/system/usr/bin/etcd" "$work/system/usr/bin/kubectl" "${parts[@]/#/$work/}" .
chmod -R u+w work && rm -rf work
ls -la "$into"
