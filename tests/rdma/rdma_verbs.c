/* The few verbs the tests need, without UCX or anything else between: one protection domain, one reliable connection.
 * Every function returns 0, or a negative errno; a completion that failed returns its ibv_wc_status as a positive number. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct tv {
  struct ibv_context *context;
  struct ibv_pd *pd;
  struct ibv_cq *cq;
  struct ibv_qp *qp;
};
struct tv_address { union ibv_gid gid; uint32_t qpn; };
enum { PORT = 1, GID = 1, PSN = 0 };

int tv_close(struct tv *v) {
  if (v->qp) ibv_destroy_qp(v->qp);
  if (v->cq) ibv_destroy_cq(v->cq);
  if (v->pd) ibv_dealloc_pd(v->pd);
  if (v->context) ibv_close_device(v->context);
  free(v);
  return 0;
}

struct tv *tv_open(const char *name) {
  int count = 0;
  struct ibv_device **devices = ibv_get_device_list(&count);
  struct tv *v = calloc(1, sizeof *v);
  for (int i = 0; v && devices && i < count; i++)
    if (!strcmp(ibv_get_device_name(devices[i]), name)) v->context = ibv_open_device(devices[i]);
  if (devices) ibv_free_device_list(devices);
  if (v && v->context && (v->pd = ibv_alloc_pd(v->context)) && (v->cq = ibv_create_cq(v->context, 16, NULL, NULL, 0))) {
    struct ibv_qp_init_attr how = {.send_cq = v->cq, .recv_cq = v->cq, .qp_type = IBV_QPT_RC,
                                   .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1}};
    if ((v->qp = ibv_create_qp(v->pd, &how))) return v;
  }
  if (v) tv_close(v);
  return NULL;
}

int tv_address(struct tv *v, struct tv_address *mine) {
  mine->qpn = v->qp->qp_num;
  return ibv_query_gid(v->context, PORT, GID, &mine->gid) ? -EIO : 0;
}

int tv_connect(struct tv *v, const struct tv_address *peer) {
  struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = PORT,
                             .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE};
  struct ibv_qp_attr receive = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = peer->qpn, .rq_psn = PSN,
                                .max_dest_rd_atomic = 4, .min_rnr_timer = 12,
                                .ah_attr = {.is_global = 1, .port_num = PORT, .grh = {.sgid_index = GID, .hop_limit = 2}}};
  struct ibv_qp_attr send = {.qp_state = IBV_QPS_RTS, .sq_psn = PSN, .timeout = 14, .retry_cnt = 3, .rnr_retry = 3,
                             .max_rd_atomic = 4};
  receive.ah_attr.grh.dgid = peer->gid;
  int code = ibv_modify_qp(v->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (!code)
    code = ibv_modify_qp(v->qp, &receive, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (!code)
    code = ibv_modify_qp(v->qp, &send, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                           IBV_QP_MAX_QP_RD_ATOMIC);
  return -code;
}

struct ibv_mr *tv_register(struct tv *v, void *address, size_t bytes, uint32_t *lkey, uint32_t *rkey) {
  struct ibv_mr *mr =
      ibv_reg_mr(v->pd, address, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
  if (mr) *lkey = mr->lkey, *rkey = mr->rkey;
  return mr;
}

int tv_deregister(struct ibv_mr *mr) { return -ibv_dereg_mr(mr); }

int tv_move(struct tv *v, int write, uint64_t local, uint32_t lkey, uint64_t remote, uint32_t rkey, uint32_t bytes) {
  struct ibv_sge piece = {.addr = local, .length = bytes, .lkey = lkey};
  struct ibv_send_wr work = {.sg_list = &piece, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
                             .opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ,
                             .wr.rdma = {.remote_addr = remote, .rkey = rkey}};
  struct ibv_send_wr *bad;
  struct ibv_wc done;
  int found, code = ibv_post_send(v->qp, &work, &bad);
  if (code) return -code;
  while (!(found = ibv_poll_cq(v->cq, 1, &done))) {
  }
  return found < 0 ? -EIO : (int)done.status;
}
