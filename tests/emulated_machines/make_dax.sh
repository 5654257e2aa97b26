#!/bin/sh
# In the guest: makes the CXL type-3 device a region, and the region a DAX device (Linux 6.1: what `cxl create-region`
# does, for Debian 12 has no such package).
set -e
cxl=/sys/bus/cxl/devices
size=0x10000000
echo pmem > $cxl/decoder2.0/mode
echo $size > $cxl/decoder2.0/dpa_size
region=$(cat $cxl/decoder0.0/create_pmem_region)
echo "$region" > $cxl/decoder0.0/create_pmem_region
echo 256 > $cxl/"$region"/interleave_granularity
echo 1 > $cxl/"$region"/interleave_ways
echo 9f5c7e2e-6c4a-4f6b-9a53-0d5a3b8a7c11 > $cxl/"$region"/uuid
echo $size > $cxl/"$region"/size
echo decoder2.0 > $cxl/"$region"/target0
echo 1 > $cxl/"$region"/commit
echo "$region" > /sys/bus/cxl/drivers/cxl_region/bind
ndctl create-namespace --mode=devdax --map=mem --region="$region" --force > /dev/null
