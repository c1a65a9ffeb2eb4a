#!/bin/bash
# bake.sh UPPER UV SKY_WHEELS WHEELS CHECKOUT: fills UPPER with the image's layer. Runs in a mount namespace of its own.
set -euo pipefail
source "$(dirname "$0")/assemble.sh"
upper=$1 uv=$2 sky_wheels=$3 wheels=$4 checkout=$5
mount --make-rprivate /
root=$(mktemp -d)
mount -t tmpfs tmpfs "$root"
mkdir "$root/root"
root=$root/root
assemble "$root" "$upper" ""

rm -rf "$root/usr/local"  # whatever this machine keeps there
mkdir -p "$root"/usr/local/{bin,sbin,lib,share,etc} "$root/opt/spotrl/wheels" "$root"/var/{lib,log,tmp,cache}
mkdir -p "$root/var/lib/dpkg" "$root/var/lib/sudo"
chmod 1777 "$root/var/tmp"
install -m 755 "$uv" "$root/usr/local/bin/uv"
cp /etc/resolv.conf "$root/tmp/resolv.conf" 2>/dev/null || true
cp -r "$sky_wheels" "$root/tmp/wheels"
mount --bind "$wheels" "$root/opt/spotrl/wheels"
mkdir "$root/opt/spotrl/uv" "$root/tmp/checkout"
chown 1000:1000 "$root/opt/spotrl/uv"
cp -r "$checkout/engine" "$root/tmp/checkout/engine"
cp "$(dirname "$0")/keep_bytecode.py" "$root/tmp/keep_bytecode.py"
pip_settings=$(cat /etc/pip.conf 2>/dev/null || true)

cat > "$root/tmp/inside.sh" <<'INSIDE'
set -euo pipefail
# This machine's own people are not the image's.
for user in $(awk -F: '$3 >= 1000 && $3 < 60000 { print $1 }' /etc/passwd) ubuntu gcpuser; do
  sed -i "/^$user:/d" /etc/passwd /etc/shadow
done
for group in $(awk -F: '$3 >= 1000 && $3 < 60000 { print $1 }' /etc/group) ubuntu; do
  sed -i "/^$group:/d" /etc/group /etc/gshadow
done
# Both clouds' login names are one account, so that one baked home serves both.
groupadd -g 1000 -o ubuntu
useradd -m -o -u 1000 -g 1000 -d /home/ubuntu -s /bin/bash -p '*' ubuntu
useradd -M -o -u 1000 -g 1000 -d /home/ubuntu -s /bin/bash -p '*' gcpuser
printf 'ubuntu ALL=(ALL) NOPASSWD:ALL\ngcpuser ALL=(ALL) NOPASSWD:ALL\n' > /etc/sudoers.d/clouds
chmod 440 /etc/sudoers.d/clouds
# No service manager: SkyPilot's set-up asks it to stop services that are not there either.
printf '#!/bin/sh\nexit 0\n' > /usr/local/bin/systemctl
for end in shutdown poweroff halt reboot; do
  printf '#!/bin/sh\n# The machine ends with its first process.\nkill -TERM 1\n' > /usr/sbin/$end.new
  mv /usr/sbin/$end.new /usr/sbin/$end
  ln -sf /usr/sbin/$end /usr/local/sbin/$end
done
chmod 755 /usr/local/bin/systemctl /usr/sbin/{shutdown,poweroff,halt,reboot}
rm -f /etc/ssh/ssh_host_* && ssh-keygen -q -A
cat > /etc/ssh/sshd_config <<'C'
UsePAM no
PasswordAuthentication no
PubkeyAuthentication yes
PermitRootLogin no
StrictModes no
MaxSessions 100
MaxStartups 200:30:400
UseDNS no
Subsystem sftp internal-sftp
AcceptEnv LANG
Include /etc/ssh/sshd_config.d/*.conf
C
mkdir -p /etc/ssh/sshd_config.d /etc/uv /home/ubuntu/.ssh /home/ubuntu/.local/bin
printf '[global]\nno-index = true\nfind-links = /opt/spotrl/wheels\ndisable-pip-version-check = true\n' > /etc/pip.conf.hosts
# uv has unpacked every wheel already, and links to what it unpacked: an environment takes seconds, and all hosts of this
# machine share one copy of its files in memory.
printf 'no-index = true\nfind-links = ["/opt/spotrl/wheels"]\ncache-dir = "/opt/spotrl/uv"\nlink-mode = "symlink"\n' \
  > /etc/uv.toml.hosts
ln -s /usr/local/bin/uv /home/ubuntu/.local/bin/uv
mkdir -p /home/ubuntu/.sky && cp -r /tmp/wheels /home/ubuntu/.sky/wheels
chown -R ubuntu:ubuntu /home/ubuntu && chmod 700 /home/ubuntu/.ssh
chmod 1777 /tmp
rm -f /etc/npmrc /etc/hosts.allow /etc/hosts.deny
cat > /tmp/user.sh <<'U'
set -euo pipefail
cd /home/ubuntu
export HOME=/home/ubuntu UV_LINK_MODE=copy UV_CACHE_DIR=/tmp/uv VIRTUAL_ENV=/home/ubuntu/skypilot-runtime
hash=$(ls .sky/wheels | grep -v current | head -1)
uv -q venv --seed skypilot-runtime --python /usr/bin/python3
uv -q venv --seed --relocatable --system-site-packages sky-user-env --python /usr/bin/python3
uv -q pip install "$(echo .sky/wheels/$hash/*.whl)[aws,gcp,remote]" 'setuptools<70' 'click<8.2' 'ray[default]==2.9.3' 'pydantic-core==2.41.1'
printf %s "$hash" > .sky/wheels/current_sky_wheel_hash
skypilot-runtime/bin/python -m compileall -q -j 2 skypilot-runtime/lib >/dev/null 2>&1 || true
U
setpriv --reuid 1000 --regid 1000 --clear-groups bash /tmp/user.sh
mv /etc/pip.conf.hosts /etc/pip.conf
mv /etc/uv.toml.hosts /etc/uv/uv.toml
cat > /tmp/node.sh <<'U'
set -euo pipefail
export HOME=/home/ubuntu
cd /tmp
uv -q venv env --python 3.11 || uv -q venv --clear env --python '>=3.11'
uv -q pip install --python env/bin/python --no-deps --require-hashes -r /opt/spotrl/wheels/node.lock
PYTHONPATH=checkout env/bin/python -c 'import engine.node.agent, engine.entrypoints.processes, engine.node.remote_console, ray'
env/bin/python keep_bytecode.py env
U
setpriv --reuid 1000 --regid 1000 --clear-groups bash /tmp/node.sh
INSIDE
[ -z "$pip_settings" ] || printf '%s\n' "$pip_settings" > "$root/etc/pip.conf"
# Names are looked up as here; the overlay's /etc has this machine's resolv.conf.
chroot "$root" bash /tmp/inside.sh
# What this machine says of itself is not the image's.
printf '127.0.0.1 localhost\n' > "$root/etc/hosts"
: > "$root/etc/resolv.conf"
rm -f "$root/etc/machine-id"
