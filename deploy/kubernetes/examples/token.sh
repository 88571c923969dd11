#!/bin/sh
# Makes the token that the pods of the examples in this folder share.
kubectl create secret generic holdfast-token --from-literal=token="$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')"
