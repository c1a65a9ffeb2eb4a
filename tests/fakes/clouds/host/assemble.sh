# assemble ROOT UPPER IMAGE: mounts at ROOT what a host (or the bake) sees. Sourced, inside a mount namespace of its own.
#
# Nothing of this machine is visible but /usr (without /usr/local) and /etc, read through an overlay; all else is the
# image's, or empty. UPPER takes what is written. In the bake, UPPER is the image itself and IMAGE is empty.
assemble() {
  local root=$1 upper=$2 image=$3 part below
  mount -t tmpfs -o mode=755 host "$root"
  for part in usr etc var home opt; do
    mkdir -p "$root/$part" "$upper/$part" "$upper/.work/$part"
    below=${image:+$image/$part}
    case $part in usr | etc) below=${below:+$below:}/$part ;; esac
    if [ -z "$below" ]; then
      mount --bind "$upper/$part" "$root/$part"
    else
      # volatile: what a host writes need not survive, so nothing waits for the disk
      mount -t overlay -o "lowerdir=$below,upperdir=$upper/$part,workdir=$upper/.work/$part,volatile" host "$root/$part" 2>/dev/null ||
        { rm -rf "$upper/.work/$part" && mkdir -p "$upper/.work/$part" &&
          mount -t overlay -o "lowerdir=$below,upperdir=$upper/$part,workdir=$upper/.work/$part" host "$root/$part"; }
    fi
  done
  for part in bin sbin lib lib64; do ln -s "usr/$part" "$root/$part"; done
  mkdir -m 700 "$root/root"
  mkdir "$root/proc" "$root/sys" "$root/dev" "$root/run" "$root/tmp" "$root/mnt" "$root/srv"
  mount -t proc proc "$root/proc"
  mount -t sysfs -o ro sysfs "$root/sys"
  mount -t tmpfs -o mode=755 dev "$root/dev"
  for part in null zero full random urandom tty; do
    touch "$root/dev/$part"
    mount --bind "/dev/$part" "$root/dev/$part"
  done
  mkdir "$root/dev/pts" "$root/dev/shm"
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
  ln -s pts/ptmx "$root/dev/ptmx"
  ln -s /proc/self/fd "$root/dev/fd"
  ln -s /proc/self/fd/0 "$root/dev/stdin"
  ln -s /proc/self/fd/1 "$root/dev/stdout"
  ln -s /proc/self/fd/2 "$root/dev/stderr"
  mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
  mount -t tmpfs -o mode=1777 tmp "$root/tmp"
  mount -t tmpfs -o mode=755 run "$root/run"
  ln -sfn /run "$root/var/run"
}
