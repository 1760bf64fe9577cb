/* What a CUDA error means to a user: pure functions from the error's number to a line and a hint. See cuda.h. */
#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>

#include "cuda.h"
#include "kernels/base/check.h"

enum { CUDA_MAJOR_LEAST = 12 }; /* scripts/probe.sh builds with 12.4 or newer */

/* The GPUs that nvcc compiled for: "80, 90". */
static const char *built_for(char *buf, size_t buf_len) {
    static const int archs[] = {
#ifdef __CUDA_ARCH_LIST__
        __CUDA_ARCH_LIST__
#endif
    };
    size_t used = 0;
    buf[0] = 0;
    for (int arch : archs) used += (size_t)snprintf(buf + used, buf_len - used, "%s%d", used ? ", " : "", arch / 10);
    return buf;
}

static int refuse(char *hint, const char *text) {
    snprintf(hint, ERR_LEN, "%s", text);
    return -1;
}

static int explain_driver(int error, const CudaDevice *gpu, char *err, char *hint) {
    const int driver = gpu->driver_version, runtime = gpu->runtime_version;
    if (driver == 0) {
        err_set(err, "no CUDA driver on this machine");
        return refuse(hint, "install NVIDIA's driver, or set run.device to \"cpu\"");
    }
    if (error == cudaErrorSystemDriverMismatch) {
        err_set(err, "the driver's library (CUDA %d.%d) and its kernel module are of different versions", driver / 1000,
                driver % 1000 / 10);
        return refuse(hint, "reboot after the driver's update; in a container the host's driver counts");
    }
    if (error == cudaErrorCompatNotSupportedOnDevice) {
        err_set(err, "the CUDA %d.%d compatibility package does not work on this GPU", driver / 1000,
                driver % 1000 / 10);
        return refuse(hint, "take cuda-compat out of LD_LIBRARY_PATH, and update the driver if it is then too old");
    }
    /* Within one major version an older driver runs a newer toolkit's machine code. */
    err_set(err, "the driver supports CUDA %d.%d, this binary was built with CUDA %d.%d", driver / 1000,
            driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    snprintf(hint, ERR_LEN, "a driver for CUDA %d.0 or newer", runtime / 1000);
    const size_t used = strlen(hint);
    if (driver / 1000 >= CUDA_MAJOR_LEAST)
        snprintf(hint + used, ERR_LEN - used, ", or a build with a CUDA %d toolkit (make CUDA_HOME=...)",
                 driver / 1000);
    return -1;
}

/* Code for this GPU is missing, or its driver cannot make it from PTX. */
static int explain_code(int error, const CudaDevice *gpu, char *err, char *hint) {
    snprintf(hint, ERR_LEN, "rebuild for this GPU: make GPU_ARCHS=%d%d", gpu->major, gpu->minor);
    const size_t used = strlen(hint);
    if (error == cudaErrorUnsupportedPtxVersion) {
        snprintf(hint + used, ERR_LEN - used, " (then the driver compiles nothing), or install a newer driver");
        return err_set(err, "the driver supports CUDA %d.%d and cannot compile the PTX of CUDA %d.%d for %s (sm_%d%d)",
                       gpu->driver_version / 1000, gpu->driver_version % 1000 / 10, gpu->runtime_version / 1000,
                       gpu->runtime_version % 1000 / 10, gpu->name, gpu->major, gpu->minor);
    }
    if (error == cudaErrorJitCompilerNotFound || error == cudaErrorJitCompilationDisabled)
        return err_set(err, "%s (sm_%d%d) needs the driver's PTX compiler, which is %s", gpu->name, gpu->major,
                       gpu->minor, error == cudaErrorJitCompilerNotFound ? "not installed" : "switched off");
    char list[128];
    return err_set(err, "this binary has no code for %s (sm_%d%d): it was built for sm %s", gpu->name, gpu->major,
                   gpu->minor, built_for(list, sizeof list));
}

int cuda_explain_start(int error, const CudaDevice *gpu, char *err, char *hint) {
    const char *name = gpu->name[0] ? gpu->name : "the GPU";
    switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice: return explain_driver(error, gpu, err, hint);
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled: return explain_code(error, gpu, err, hint);
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
        err_set(err, "the driver (CUDA %d.%d) shows this process no GPU", gpu->driver_version / 1000,
                gpu->driver_version % 1000 / 10);
        return refuse(hint, "nvidia-smi lists GPUs; CUDA_VISIBLE_DEVICES and a container's --gpus choose among them");
    case cudaErrorDevicesUnavailable:
        err_set(err, "%s is busy, or set to exclusive use and taken", name);
        return refuse(hint, "nvidia-smi lists who holds it, nvidia-smi -q -d COMPUTE its mode; wait or choose another "
                            "with CUDA_VISIBLE_DEVICES");
    case cudaErrorMemoryAllocation:
        err_set(err, "%s has no memory left to start in", name);
        return refuse(hint, "another process holds the GPU's memory: see nvidia-smi");
    case cudaErrorSystemNotReady:
        err_set(err, "the GPUs of this machine are not ready");
        return refuse(hint, "where GPUs are joined by NVSwitch, the service nvidia-fabricmanager must run");
    case cudaErrorMpsConnectionFailed:
    case cudaErrorMpsServerNotReady:
        err_set(err, "the MPS server that shares the GPUs does not answer");
        return refuse(hint, "restart nvidia-cuda-mps-control, or take CUDA_MPS_PIPE_DIRECTORY out of the environment");
    default:
        err_set(err, "%s cannot be used: %s (%s)", name, cudaGetErrorString((cudaError_t)error),
                cudaGetErrorName((cudaError_t)error));
        return refuse(hint, cuda_failure_hint(error));
    }
}

const char *cuda_failure_hint(int error) {
    switch (error) {
    case cudaErrorMemoryAllocation:
        return "the memory plan was exceeded or another process took the memory: see train_moe plan and nvidia-smi";
    case cudaErrorECCUncorrectable:
        return "the GPU's memory failed: nvidia-smi -q -d ECC; reset it or take another with CUDA_VISIBLE_DEVICES";
    case cudaErrorHardwareStackError:
    case cudaErrorNvlinkUncorrectable:
    case 226: /* cudaErrorContained, which CUDA 12.4 does not know */
        return "the GPU's hardware failed: dmesg | grep -i xid; reset it or take another with CUDA_VISIBLE_DEVICES";
    case cudaErrorDevicesUnavailable:
    case cudaErrorDeviceUninitialized:
    case cudaErrorUnknown:
        return "the GPU was lost or reset: dmesg | grep -i xid says why; nvidia-smi shows whether it is back";
    case cudaErrorLaunchTimeout:
        return "a kernel ran longer than the desktop's limit for GPUs: stop the display server, or use another GPU";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
        return "our bug or failing hardware: CUDA_LAUNCH_BLOCKING=1 names the op exactly, dmesg | grep -i xid and "
               "nvidia-smi -q -d ECC show the hardware";
    default: return "dmesg | grep -i xid shows what the driver saw; if it shows nothing, this is our bug: report it";
    }
}

int cuda_failure_text(const char *what, const char *op, const char *about, char *err) {
    return err_set(err, "the GPU failed%s%s%s%s: %s", op ? " at or before " : "", op ? op : "", about[0] ? ", " : "",
                   about, what);
}

int cuda_check_fp8(const CudaDevice *gpu, char *err, char *hint) {
    refuse(hint, "set precision.compute to \"bf16\"");
    if (gpu->major != 9) /* scales of 128 and the kernels of sm90/ are Hopper's alone */
        return err_set(err, "precision.compute is fp8, which needs Hopper (sm_90): %s is sm_%d%d", gpu->name,
                       gpu->major, gpu->minor);
    const int major = (int)(gpu->cublaslt_version / 10000), minor = (int)(gpu->cublaslt_version / 100 % 100);
    if (major > 12 || (major == 12 && minor >= 9)) return 0;
    return err_set(err, "precision.compute is fp8, which needs cuBLASLt 12.9 or newer: found %d.%d", major, minor);
}

/* ---- in the middle of a run: the end of the process -------------------------------------------------------------- */

__attribute__((noreturn)) static void fail(const char *file, int line, const char *what, const char *hint) {
    char err[ERR_LEN], about[ERR_LEN / 2], place[ERR_LEN / 2];
    const char *slash = strrchr(file, '/');
    snprintf(place, sizeof place, "%s (%s:%d)", what, slash ? slash + 1 : file, line);
    cuda_failure_text(place, ops_last(), check_about(about, sizeof about), err);
    FAIL(hint, "%s", err);
}

void cuda_failed(const char *file, int line, int error) {
    char what[256];
    snprintf(what, sizeof what, "%s, %s", cudaGetErrorString((cudaError_t)error), cudaGetErrorName((cudaError_t)error));
    fail(file, line, what, cuda_failure_hint(error));
}

void cublas_failed(const char *file, int line, const char *status) {
    char what[256];
    snprintf(what, sizeof what, "cuBLASLt: %s", status);
    fail(file, line, what, cuda_failure_hint(cudaErrorLaunchFailure));
}
