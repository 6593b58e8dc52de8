#!/bin/sh
# Makes the secrets of docker-compose.yml in a folder: sh deploy/secrets.sh FOLDER
#
# Those that are there stay: changing one does not change the password that a service was set up with. The folder is
# private to this user; the files are readable, because each is mounted alone into containers that run as other users.
set -eu
folder=${1:?"name the folder, for instance: sh deploy/secrets.sh deploy/secrets"}
mkdir -p "$folder"
chmod 700 "$folder"
for name in minio-password db-admin-password db-owner-password db-app-password; do
    if [ ! -s "$folder/$name" ]; then
        # 24 random bytes: 32 characters of the alphabet of base64 for URLs, and no line end.
        head -c 24 /dev/urandom | base64 | tr '+/' '-_' | tr -d '\n' >"$folder/$name.new"
        chmod 444 "$folder/$name.new"
        mv "$folder/$name.new" "$folder/$name"
        echo "made $folder/$name"
    fi
done
