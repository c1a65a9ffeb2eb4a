#!/bin/bash
# boot.sh FOLDER IMAGE WHEELS: the first process of a host, inside its own namespaces; ends as its sshd.
# FOLDER has name, keys, user, environment (NAME=value lines), hosts and ca.pem; upper/ is mounted for what the host writes.
set -euo pipefail
source "$(dirname "$0")/assemble.sh"
folder=$1 image=$2 wheels=$3
mount --make-rprivate /
mkdir -p "$folder/upper" "$folder/root"
# The disk of a host is in memory and ends with the host. On the disk of this computer, ext4 does not reuse the inodes of
# deleted files for minutes: after the 35,000 files of each ended host, the next host wrote its own six times slower.
mount -t tmpfs -o mode=755 disk "$folder/upper"
root=$folder/root
assemble "$root" "$folder/upper" "$image"
name=$(cat "$folder/name")
hostname "$name"
echo "$name" > "$root/etc/hostname"
cat "$folder/hosts" > "$root/etc/hosts"
cat "$folder/ca.pem" >> "$root/etc/ssl/certs/ca-certificates.crt"
mount --bind "$wheels" "$root/opt/spotrl/wheels"
mount -o remount,bind,ro "$root/opt/spotrl/wheels"
install -o 1000 -g 1000 -m 600 "$folder/keys" "$root/home/ubuntu/.ssh/authorized_keys"
cat "$folder/environment" > "$root/etc/environment"
# Every session sees the cloud's endpoints, as it would see the real ones by name.
{ printf 'SetEnv'; while read -r line; do [ -z "$line" ] || printf ' %s' "$line"; done < "$folder/environment"; echo; } \
  > "$root/etc/ssh/sshd_config.d/cloud.conf"
mkdir -p "$root/run/sshd" "$root/old"
cd "$root"
pivot_root . old
umount -l /old
rmdir /old
# Without these nobody on the host reaches the machine below: no mounts, no devices, no clock, no modules, no network set-up.
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin setpriv --bounding-set \
  -sys_admin,-sys_module,-sys_time,-sys_boot,-sys_rawio,-mknod,-net_admin,-syslog,-mac_admin,-mac_override \
  /usr/sbin/sshd -D -e
