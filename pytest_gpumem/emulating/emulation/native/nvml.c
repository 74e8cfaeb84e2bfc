/* The NVML functions that torch and pynvml call. No processes are listed, and clocks never change, because nothing runs. */
#include <stdio.h>
#include <string.h>

#include "emulated.h"

enum { NOT_SUPPORTED = 3, NOT_FOUND = 6, INVALID_ARGUMENT = 2 };
typedef uintptr_t Device; /* the device's number plus 1 */

int nvmlInit(void) { return 0; } /* torch uses this name when it counts GPUs */
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) {
    return !error ? "Success" : error == NOT_SUPPORTED ? "Not Supported" : error == NOT_FOUND ? "Not Found" : "Unknown Error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "emulated"); return 0; }
int nvmlSystemGetNVMLVersion(char *text, unsigned length) { snprintf(text, length, "%d.emulated", CUDA_MAJOR); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = CUDA_VERSION; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA_VERSION; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)gpumem_gpu.count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if (index >= (unsigned)gpumem_gpu.count) return INVALID_ARGUMENT;
    *device = index + 1;
    return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *text, Device *device) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < 16 || bus - 16 >= (unsigned)gpumem_gpu.count) return NOT_FOUND;
    *device = bus - 16 + 1;
    return 0;
}
int nvmlDeviceGetUUID(Device device, char *text, unsigned length) {
    unsigned char u[16];
    gpumem_uuid((int)device - 1, u);
    snprintf(
        text, length, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3], u[4],
        u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]
    );
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *wanted, Device *device) {
    char text[64];
    for (int i = 0; i < gpumem_gpu.count; i++) {
        nvmlDeviceGetUUID((Device)i + 1, text, sizeof text);
        if (!strcmp(text, wanted)) { *device = (Device)i + 1; return 0; }
    }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(Device device, unsigned *index) { *index = (unsigned)device - 1; return 0; }
int nvmlDeviceGetName(Device device, char *name, unsigned length) { snprintf(name, length, "%s", gpumem_told()->name); return 0; }
/* `memory` gets the total, free and used bytes. */
int nvmlDeviceGetMemoryInfo(Device device, unsigned long long *memory) {
    memory[0] = gpumem_told()->total_bytes;
    memory[2] = gpumem_used((int)device - 1);
    memory[1] = memory[0] - memory[2];
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
    *major = gpumem_told()->major;
    *minor = gpumem_told()->minor;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, void *processes) { *count = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses(Device device, unsigned *count, void *processes) { *count = 0; return 0; }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned *count, void *processes) { *count = 0; return 0; }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(Device device, unsigned *count, void *processes) { *count = 0; return 0; }
/* `kind` is a number from nvmlClockType_t: 2 is the memory's clock. */
int nvmlDeviceGetClockInfo(Device device, int kind, unsigned *mhz) {
    *mhz = (unsigned)(kind == 2 ? gpumem_told()->memory_khz : gpumem_told()->sm_khz) / 1000;
    return 0;
}
int nvmlDeviceGetMaxClockInfo(Device device, int kind, unsigned *mhz) { return nvmlDeviceGetClockInfo(device, kind, mhz); }
int nvmlDeviceGetDefaultApplicationsClock(Device device, int kind, unsigned *mhz) { return nvmlDeviceGetClockInfo(device, kind, mhz); }
int nvmlDeviceGetApplicationsClock(Device device, int kind, unsigned *mhz) { return nvmlDeviceGetClockInfo(device, kind, mhz); }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *reasons) { *reasons = 0; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *reasons) { *reasons = 0; return 0; }
int nvmlDeviceGetMigMode(Device device, unsigned *now, unsigned *later) { *now = *later = 0; return 0; }
int nvmlDeviceGetUtilizationRates(Device device, unsigned *rates) { rates[0] = rates[1] = 0; return 0; }
int nvmlDeviceGetTemperature(Device device, int sensor, unsigned *celsius) { return NOT_SUPPORTED; }
int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts) { return NOT_SUPPORTED; }
int nvmlDeviceGetP2PStatus(Device from, Device to, int index, int *status) { *status = 0; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
/* There is no fabric: the state, which follows version, cluster, status and clique, is 0. torch calls this function for expandable
   segments, and requires that it succeeds. */
int nvmlDeviceGetGpuFabricInfoV(Device device, void *info) {
    memset((char *)info + sizeof(unsigned), 0, 16 + 4 + 4 + 1);
    return 0;
}
int nvmlDeviceGetGpuFabricInfo(Device device, void *info) { memset(info, 0, 16 + 4 + 4 + 1); return 0; }
