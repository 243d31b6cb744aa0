#!/boot/sh
# The first and only service of the machine: mounts the host's folders, makes the RDMA device, runs the job, powers off.
# busybox's applets are called by its name: its shell would take them for programs of /usr with more options.
b=/boot/busybox
end() { $b sync; $b poweroff -f; $b sleep 10; }
fail() { echo "rdma-vm: $*" >/dev/console; echo "$*" >/job/failure; end; }
now() { $b cut -d' ' -f1 /proc/uptime; }

$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
$b mkdir -p /dev/shm /dev/pts
$b mount -t tmpfs -o mode=1777 tmpfs /dev/shm
$b mount -t devpts devpts /dev/pts
$b mount -t tmpfs -o mode=1777 tmpfs /tmp
for link in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do $b ln -sf "/proc/self/${link#*:}" "/dev/${link%%:*}"; done
while read -r module; do $b insmod "/boot/modules/$module.ko" || fail "the kernel did not take module $module"; done </boot/order

# 500 KiB is what virtio allows a 9p message. "loose" believes that nobody changes what is read; "mmap" lets it be mapped.
nine=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o $nine job /job || fail "the job's folder cannot be mounted"
while read -r tag mode folder; do
  $b mkdir -p "$folder"
  [ "$mode" = ro ] && how=ro,cache=loose || how=rw,cache=mmap
  $b mount -t 9p -o $how,$nine "$tag" "$folder" || fail "$folder cannot be mounted"
done </job/mounts

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin HOME=/root
$b hostname rdma-vm
ip link set lo up
# The module has made dummy0, whose frames loop inside rxe. 9000 bytes: an RDMA MTU of 4096 instead of 1024.
ip addr add 10.99.0.1/24 dev dummy0 && ip link set dummy0 mtu 9000 up ||
  fail "there is no network device for RDMA"
rdma link add rxe0 type rxe netdev dummy0 || fail "rdma link add failed"
tries=0
until [ -e /dev/infiniband/uverbs0 ] && $b grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state; do
  tries=$((tries + 1))
  [ $tries -lt 200 ] || fail "rxe0 did not become active"
  $b usleep 50000
done
now >/job/ready
ulimit -l unlimited

# The job's streams leave by two ports. The pipes before them let a child open /dev/stdout anew.
for port in /sys/class/virtio-ports/*; do
  $b mkfifo "/run/$($b cat "$port/name")"
  $b cat "/run/$($b cat "$port/name")" >"/dev/${port##*/}" &
done
/bin/bash /job/run </dev/null >/run/out 2>/run/err
status=$?
now >/job/ended
# What the job left behind may keep a stream open: it is not waited for.
tries=0
while [ $tries -lt 60 ] && [ "$($b pgrep -P 1 -x cat | $b wc -l)" -gt 0 ]; do tries=$((tries + 1)); $b usleep 50000; done
echo $status >/job/status.new
$b mv /job/status.new /job/status
end
