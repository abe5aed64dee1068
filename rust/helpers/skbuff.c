// SPDX-License-Identifier: GPL-2.0

#include <linux/dma-mapping.h>
#include <linux/if_vlan.h>
#include <linux/skbuff.h>
#include <net/dst.h>

__rust_helper unsigned int rust_helper_skb_headlen(const struct sk_buff *skb)
{
	return skb_headlen(skb);
}

__rust_helper unsigned int rust_helper_skb_headroom(const struct sk_buff *skb)
{
	return skb_headroom(skb);
}

__rust_helper int rust_helper_skb_tailroom(const struct sk_buff *skb)
{
	return skb_tailroom(skb);
}

__rust_helper void rust_helper_skb_reserve(struct sk_buff *skb, int len)
{
	skb_reserve(skb, len);
}

__rust_helper int rust_helper_skb_cloned(const struct sk_buff *skb)
{
	return skb_cloned(skb);
}

__rust_helper bool rust_helper_skb_is_gso(const struct sk_buff *skb)
{
	return skb_is_gso(skb);
}

__rust_helper struct sk_buff *rust_helper_skb_share_check(struct sk_buff *skb, gfp_t pri)
{
	return skb_share_check(skb, pri);
}

__rust_helper void rust_helper_skb_reset_mac_header(struct sk_buff *skb)
{
	skb_reset_mac_header(skb);
}

__rust_helper void rust_helper_skb_set_network_header(struct sk_buff *skb, int offset)
{
	skb_set_network_header(skb, offset);
}

__rust_helper int rust_helper_skb_mac_header_was_set(const struct sk_buff *skb)
{
	return skb_mac_header_was_set(skb);
}

__rust_helper int rust_helper_skb_mac_offset(const struct sk_buff *skb)
{
	return skb_mac_offset(skb);
}

__rust_helper void rust_helper_skb_mark_not_on_list(struct sk_buff *skb)
{
	skb_mark_not_on_list(skb);
}

__rust_helper u16 rust_helper_skb_get_queue_mapping(const struct sk_buff *skb)
{
	return skb_get_queue_mapping(skb);
}

__rust_helper bool rust_helper_skb_vlan_tag_present(const struct sk_buff *skb)
{
	return skb_vlan_tag_present(skb);
}

__rust_helper u16 rust_helper_skb_vlan_tag_get_id(const struct sk_buff *skb)
{
	return skb_vlan_tag_get_id(skb);
}

__rust_helper struct sk_buff *rust_helper___vlan_hwaccel_push_inside(struct sk_buff *skb)
{
	return __vlan_hwaccel_push_inside(skb);
}

__rust_helper void rust_helper_skb_queue_head_init(struct sk_buff_head *list)
{
	skb_queue_head_init(list);
}

__rust_helper __u32 rust_helper_skb_queue_len_lockless(const struct sk_buff_head *list)
{
	return skb_queue_len_lockless(list);
}

/* Bit fields. */
__rust_helper u8 rust_helper_skb_ip_summed(const struct sk_buff *skb)
{
	return skb->ip_summed;
}

__rust_helper void rust_helper_skb_set_ip_summed(struct sk_buff *skb, u8 ip_summed)
{
	skb->ip_summed = ip_summed;
}

/* Members of anonymous unions and structures. */
__rust_helper void rust_helper_skb_set_dev(struct sk_buff *skb, struct net_device *dev)
{
	skb->dev = dev;
}

__rust_helper struct net_device *rust_helper_skb_dev(const struct sk_buff *skb)
{
	return skb->dev;
}

__rust_helper void rust_helper_skb_set_protocol(struct sk_buff *skb, __be16 protocol)
{
	skb->protocol = protocol;
}

__rust_helper void rust_helper_skb_tx_timestamp(struct sk_buff *skb)
{
	skb_tx_timestamp(skb);
}

__rust_helper __be16 rust_helper_skb_protocol_field(const struct sk_buff *skb)
{
	return skb->protocol;
}

__rust_helper unsigned int rust_helper_skb_length(const struct sk_buff *skb)
{
	return skb->len;
}

__rust_helper unsigned char *rust_helper_skb_data(const struct sk_buff *skb)
{
	return skb->data;
}

__rust_helper struct sk_buff *rust_helper_skb_next(const struct sk_buff *skb)
{
	return skb->next;
}

__rust_helper void rust_helper___vlan_hwaccel_put_tag(struct sk_buff *skb, __be16 proto, u16 tci)
{
	__vlan_hwaccel_put_tag(skb, proto, tci);
}

__rust_helper u16 rust_helper_skb_vlan_tag_get(const struct sk_buff *skb)
{
	return skb_vlan_tag_get(skb);
}

__rust_helper netdev_features_t rust_helper_vlan_features_check(struct sk_buff *skb,
								netdev_features_t features)
{
	return vlan_features_check(skb, features);
}

__rust_helper int rust_helper_skb_linearize(struct sk_buff *skb)
{
	return skb_linearize(skb);
}

__rust_helper int rust_helper_skb_checksum_start_offset(const struct sk_buff *skb)
{
	return skb_checksum_start_offset(skb);
}

__rust_helper u16 rust_helper_skb_csum_offset(const struct sk_buff *skb)
{
	return skb->csum_offset;
}

__rust_helper int rust_helper_skb_network_offset(const struct sk_buff *skb)
{
	return skb_network_offset(skb);
}

__rust_helper int rust_helper_skb_transport_offset(const struct sk_buff *skb)
{
	return skb_transport_offset(skb);
}

__rust_helper void rust_helper_skb_set_hash(struct sk_buff *skb, __u32 hash,
					    enum pkt_hash_types type)
{
	skb_set_hash(skb, hash, type);
}

__rust_helper void rust_helper_skb_record_rx_queue(struct sk_buff *skb, u16 queue)
{
	skb_record_rx_queue(skb, queue);
}

__rust_helper void rust_helper_skb_add_rx_frag(struct sk_buff *skb, int frag, struct page *page,
					       int offset, int size, unsigned int truesize)
{
	skb_add_rx_frag(skb, frag, page, offset, size, truesize);
}

/* What is behind the data: struct skb_shared_info. */
__rust_helper unsigned int rust_helper_skb_nr_frags(const struct sk_buff *skb)
{
	return skb_shinfo(skb)->nr_frags;
}

__rust_helper unsigned int rust_helper_skb_frag_size_at(const struct sk_buff *skb,
							unsigned int frag)
{
	return skb_frag_size(&skb_shinfo(skb)->frags[frag]);
}

__rust_helper dma_addr_t rust_helper_skb_frag_dma_map_at(struct device *dev,
							 const struct sk_buff *skb,
							 unsigned int frag)
{
	return skb_frag_dma_map(dev, &skb_shinfo(skb)->frags[frag], 0,
				skb_frag_size(&skb_shinfo(skb)->frags[frag]), DMA_TO_DEVICE);
}

__rust_helper bool rust_helper_skb_has_frag_list(const struct sk_buff *skb)
{
	return skb_has_frag_list(skb);
}

__rust_helper unsigned short rust_helper_skb_gso_size(const struct sk_buff *skb)
{
	return skb_shinfo(skb)->gso_size;
}

__rust_helper unsigned short rust_helper_skb_gso_segs(const struct sk_buff *skb)
{
	return skb_shinfo(skb)->gso_segs;
}

__rust_helper unsigned int rust_helper_skb_gso_type(const struct sk_buff *skb)
{
	return skb_shinfo(skb)->gso_type;
}

__rust_helper void rust_helper_skb_orphan(struct sk_buff *skb)
{
	skb_orphan(skb);
}

__rust_helper void rust_helper_nf_reset_ct(struct sk_buff *skb)
{
	nf_reset_ct(skb);
}

__rust_helper void rust_helper_skb_dst_drop(struct sk_buff *skb)
{
	skb_dst_drop(skb);
}

/* The protocol behind all tags. */
__rust_helper __be16 rust_helper_vlan_get_protocol(const struct sk_buff *skb)
{
	return vlan_get_protocol(skb);
}

__rust_helper bool rust_helper_skb_shared(const struct sk_buff *skb)
{
	return skb_shared(skb);
}

/* The pages stay: the buffer has counts of its own of them afterwards. */
__rust_helper void rust_helper_skb_let_go_of_pages(struct sk_buff *skb)
{
	skb_zcopy_downgrade_managed(skb);
	skb_zcopy_clear(skb, false);
}
