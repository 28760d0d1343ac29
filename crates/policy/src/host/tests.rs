use proptest::prelude::*;

use super::*;

fn name(text: &str) -> String {
    match Host::parse(text) {
        Ok(Host::Name(name)) => name.as_str().to_owned(),
        other => panic!("{text:?} gave {other:?}"),
    }
}

fn ip(text: &str) -> IpAddr {
    match Host::parse(text) {
        Ok(Host::Ip(ip)) => ip,
        other => panic!("{text:?} gave {other:?}"),
    }
}

#[test]
fn pattern_covers_pattern_whose_hosts_it_matches() {
    for (wide, narrow, covers) in [
        ("a.x.example", "a.x.example", true),
        ("*.x.example", "a.x.example", true),
        ("*.x.example", "x.example", false),
        ("*.x.example", "*.x.example", true),
        ("*.x.example", "*.a.x.example", true),
        ("*.a.x.example", "*.x.example", false),
        ("a.x.example", "*.x.example", false),
        ("192.0.2.1", "192.0.2.1", true),
        ("*.x.example", "192.0.2.1", false),
    ] {
        let parse = |text| HostPattern::parse(text).unwrap();
        assert_eq!(
            parse(wide).covers(&parse(narrow)),
            covers,
            "{wide} {narrow}"
        );
    }
}

#[test]
fn name_is_normalised_to_one_spelling() {
    for (given, kept) in [
        ("example.com", "example.com"),
        ("EXAMPLE.Com", "example.com"),
        ("example.com.", "example.com"),
        ("_acme.example", "_acme.example"),
        ("a_b.example", "a_b.example"),
        ("r3---sn-x.example", "r3---sn-x.example"),
        ("localhost", "localhost"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("faß.example", "xn--fa-hia.example"),
        ("example。com", "example.com"),
        ("example．com．", "example.com"),
        ("ｅｘａｍｐｌｅ.com", "example.com"),
        ("exam\u{ad}ple.com", "example.com"),
        ("1.example", "1.example"),
        ("0x7f.example", "0x7f.example"),
        ("a.0x7g", "a.0x7g"),
        ("1e1", "1e1"),
    ] {
        assert_eq!(name(given), kept);
    }
}

#[test]
fn malformed_name_is_rejected_with_reason() {
    use BadHost as B;
    let long_label = "a".repeat(64);
    let long_name = "a.".repeat(127) + "b";
    let huge = "é".repeat(5_000);
    for (given, why) in [
        ("", B::Empty),
        (".", B::Empty),
        ("..", B::EmptyLabel),
        ("a..", B::EmptyLabel),
        (".a", B::EmptyLabel),
        ("a..b", B::EmptyLabel),
        ("\u{ad}", B::Empty),
        ("a.\u{ad}.b", B::EmptyLabel),
        ("a b", B::Forbidden(' ')),
        (" a", B::Forbidden(' ')),
        ("a\n", B::Forbidden('\n')),
        ("a\0.com", B::Forbidden('\0')),
        ("a\u{85}", B::Forbidden('\u{85}')),
        ("a\u{3000}b", B::Forbidden('\u{3000}')),
        ("a\\b", B::Forbidden('\\')),
        ("a/b", B::Forbidden('/')),
        ("user@a", B::UserInfo),
        ("a%2eb", B::Percent),
        ("a*b", B::Forbidden('*')),
        ("a,b", B::Forbidden(',')),
        ("a+b", B::Forbidden('+')),
        ("a?b", B::NotIdna),
        ("a#b", B::NotIdna),
        ("a\u{ff05}41", B::NotIdna),
        ("a\u{ff0f}b", B::NotIdna),
        ("a\u{2100}b", B::NotIdna),
        ("xn--a", B::NotIdna),
        ("xn--example-", B::NotIdna),
        ("\u{202e}moc.example", B::NotIdna),
        ("-oProxy.example", B::LeadingHyphen),
        (&long_label, B::LabelTooLong),
        (&long_name, B::TooLong),
        (&huge, B::TooLong),
        ("example.com:80", B::UnexpectedPort),
        ("a:b:c", B::BadIpv6),
    ] {
        assert_eq!(Host::parse(given), Err(why), "{given:?}");
    }
    let longest = "a.".repeat(126) + "b";
    assert_eq!(name(&longest).len(), 253);
}

#[test]
fn address_is_recognised_in_every_notation() {
    for (given, meant) in [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("2130706433.", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("017700000001", "127.0.0.1"),
        ("0x7f.1", "127.0.0.1"),
        ("0X7F.1", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0x7F.0x0.0x0.0x1", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("127.0.1", "127.0.0.1"),
        ("127.0x.1", "127.0.0.1"),
        ("127.65535", "127.0.255.255"),
        ("0", "0.0.0.0"),
        ("0x", "0.0.0.0"),
        ("00", "0.0.0.0"),
        ("000000000000000000000000000177.1", "127.0.0.1"),
        ("4294967295", "255.255.255.255"),
        ("１２７.０.０.１", "127.0.0.1"),
        ("127。0。0。1", "127.0.0.1"),
        ("①②⑦.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("[0:0:0:0:0:0:0:1]", "::1"),
        ("[::ffff:1.2.3.4]", "1.2.3.4"),
        ("::FFFF:0102:0304", "1.2.3.4"),
        ("[64:ff9b::1.2.3.4]", "64:ff9b::102:304"),
        ("[2002:0102:0304::]", "2002:102:304::"),
    ] {
        assert_eq!(ip(given), meant.parse::<IpAddr>().unwrap(), "{given:?}");
    }
}

#[test]
fn host_that_ends_in_number_is_never_a_name() {
    for given in [
        "256.0.0.1",
        "1.2.3.4.5",
        "1.2.3.256",
        "1.256.1",
        "4294967296",
        "0x100000000",
        "99999999999999999999999999",
        "08.0.0.1",
        "0x7g.0.0.1",
        "a.1",
        "a.0x1",
        "a.0x",
        "a.example.7",
        "1..2",
        "127.0.0.1..",
        "+1",
        "-1",
        "1_0.1",
    ] {
        assert!(Host::parse(given).is_err(), "{given:?}");
    }
}

#[test]
fn malformed_ipv6_address_is_rejected() {
    for (given, why) in [
        ("[::1", BadHost::BadIpv6),
        ("::1]", BadHost::BadIpv6),
        ("[[::1]]", BadHost::BadIpv6),
        ("[]", BadHost::BadIpv6),
        ("[1.2.3.4]", BadHost::BadIpv6),
        ("[example.com]", BadHost::BadIpv6),
        ("[fe80::1%eth0]", BadHost::ZoneId),
        ("fe80::1%25eth0", BadHost::ZoneId),
        ("[::ffff:0177.0.0.1]", BadHost::BadIpv6),
        ("[::1].", BadHost::BadIpv6),
        (":", BadHost::UnexpectedPort),
        ("::1@a", BadHost::UserInfo),
    ] {
        assert_eq!(Host::parse(given), Err(why), "{given:?}");
    }
}

#[test]
fn authority_is_host_with_optional_port() {
    for (given, shown) in [
        ("Example.com", "example.com"),
        ("example.com.:443", "example.com:443"),
        ("example.com:00080", "example.com:80"),
        ("[::1]:8080", "[::1]:8080"),
        ("[::1]", "[::1]"),
        ("0x7f.1:80", "127.0.0.1:80"),
        ("[::ffff:1.2.3.4]:1", "1.2.3.4:1"),
    ] {
        assert_eq!(Authority::parse(given).unwrap().to_string(), shown);
    }
    for (given, why) in [
        ("", BadHost::Empty),
        (":80", BadHost::Empty),
        ("a:", BadHost::BadPort),
        ("a:0", BadHost::BadPort),
        ("a:65536", BadHost::BadPort),
        ("a:+80", BadHost::BadPort),
        ("a: 80", BadHost::BadPort),
        ("a:80:80", BadHost::BadIpv6),
        ("::1", BadHost::BadIpv6),
        ("[::1]80", BadHost::BadIpv6),
        ("[::1]:", BadHost::BadPort),
        ("user@a:80", BadHost::UserInfo),
        ("user:pw@a", BadHost::UserInfo),
        ("a:80@b", BadHost::UserInfo),
        ("a/:80", BadHost::Forbidden('/')),
    ] {
        assert_eq!(Authority::parse(given), Err(why), "{given:?}");
    }
}

#[test]
fn pattern_is_host_or_wildcard_of_two_labels() {
    for (given, shown) in [
        ("Example.com.", "example.com"),
        ("*.Example.com.", "*.example.com"),
        ("*.bücher.example", "*.xn--bcher-kva.example"),
        ("0x7f.1", "127.0.0.1"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("localhost", "localhost"),
    ] {
        assert_eq!(HostPattern::parse(given).unwrap().to_string(), shown);
    }
    for (given, why) in [
        ("*", BadHost::BareWildcard),
        ("*.", BadHost::BareWildcard),
        ("**", BadHost::WildcardPlace),
        ("*.*", BadHost::WildcardPlace),
        ("a.*.b", BadHost::WildcardPlace),
        ("a.*", BadHost::WildcardPlace),
        ("*foo.com", BadHost::WildcardPlace),
        ("*.*.example.com", BadHost::WildcardPlace),
        ("*.com", BadHost::WildcardOverTopLevel("com".into())),
        ("*.com.", BadHost::WildcardOverTopLevel("com".into())),
        ("*..com", BadHost::EmptyLabel),
        ("*.1.2.3.4", BadHost::WildcardOverAddress),
        ("*.a.1", BadHost::BadIpv4),
        ("https://example.com", BadHost::Url),
        ("example.com:443", BadHost::UnexpectedPort),
        ("example.com/x", BadHost::Forbidden('/')),
    ] {
        assert_eq!(HostPattern::parse(given), Err(why), "{given:?}");
    }
}

#[test]
fn wildcard_matches_subdomains_of_any_depth_but_not_its_suffix() {
    let pattern = HostPattern::parse("*.x.com").unwrap();
    for (host, yes) in [
        ("a.x.com", true),
        ("a.b.c.x.com", true),
        ("A.X.COM.", true),
        ("x.com", false),
        ("ax.com", false),
        ("x.com.evil.example", false),
        ("127.0.0.1", false),
    ] {
        assert_eq!(pattern.matches(&Host::parse(host).unwrap()), yes, "{host}");
    }
}

#[test]
fn address_is_classified_by_range() {
    use AddressClass as C;
    for (given, class) in [
        ("8.8.8.8", C::Global),
        ("192.0.2.1", C::Global),
        ("198.51.100.1", C::Global),
        ("203.0.113.1", C::Global),
        ("127.0.0.1", C::Loopback),
        ("127.255.255.254", C::Loopback),
        ("0.0.0.0", C::ThisNetwork),
        ("0.1.2.3", C::ThisNetwork),
        ("10.0.0.1", C::Private),
        ("172.15.0.1", C::Global),
        ("172.16.0.1", C::Private),
        ("172.31.255.255", C::Private),
        ("172.32.0.1", C::Global),
        ("192.168.1.1", C::Private),
        ("169.254.1.1", C::LinkLocal),
        ("169.254.169.254", C::Metadata),
        ("169.254.170.2", C::Metadata),
        ("168.63.129.16", C::Metadata),
        ("100.100.100.200", C::Metadata),
        ("100.63.255.255", C::Global),
        ("100.64.0.1", C::CarrierNat),
        ("100.127.255.255", C::CarrierNat),
        ("100.128.0.0", C::Global),
        ("198.18.0.1", C::Benchmark),
        ("198.19.255.255", C::Benchmark),
        ("198.20.0.0", C::Global),
        ("192.0.0.1", C::Reserved),
        ("192.88.99.1", C::Reserved),
        ("224.0.0.1", C::Multicast),
        ("239.255.255.255", C::Multicast),
        ("240.0.0.1", C::Reserved),
        ("255.255.255.255", C::Reserved),
        ("2606:4700::1111", C::Global),
        ("2001:db8::1", C::Global),
        ("::", C::ThisNetwork),
        ("::1", C::Loopback),
        ("::ffff:127.0.0.1", C::Loopback),
        ("::ffff:8.8.8.8", C::Global),
        ("::127.0.0.1", C::Loopback),
        ("::2", C::ThisNetwork),
        ("::ffff:0:127.0.0.1", C::Loopback),
        ("64:ff9b::10.0.0.1", C::Private),
        ("64:ff9b::8.8.8.8", C::Global),
        ("64:ff9b:0:1::8.8.8.8", C::Reserved),
        ("64:ff9b:1::169.254.169.254", C::Metadata),
        ("64:ff9b:1::8.8.8.8", C::Global),
        ("64:ff9b:1:a00:0:100:808:808", C::Private),
        ("64:ff9b:1:7f:0:1:808:808", C::Loopback),
        ("64:ff9b:1:0:7f:0:108:808", C::Loopback),
        ("2002:7f00:1::", C::Loopback),
        ("2002:a9fe:a9fe::1", C::Metadata),
        ("2002:808:808::1", C::Global),
        ("2001:0:0a00:1::f7f7:f7f7", C::Private),
        ("2001:0:808:808::80ff:fffe", C::Loopback),
        ("2001:0:808:808::f7f7:f7f7", C::Global),
        ("2001:2::1", C::Benchmark),
        ("2001:20::1", C::Reserved),
        ("fc00::1", C::UniqueLocal),
        ("fdff::1", C::UniqueLocal),
        ("fd00:ec2::254", C::Metadata),
        ("fe80::1", C::LinkLocal),
        ("febf::1", C::LinkLocal),
        ("fec0::1", C::SiteLocal),
        ("ff02::1", C::Multicast),
        ("100::1", C::Reserved),
        ("5f00::1", C::Reserved),
    ] {
        let ip: IpAddr = given.parse().unwrap();
        assert_eq!(classify(ip), class, "{given}");
        assert_eq!(classify(ip).is_dialable(), class == C::Global);
    }
}

proptest! {
    #[test]
    fn parsing_never_panics_and_result_is_fixed_point(text in "\\PC{0,40}|[0-9a-fxX.:%\\[\\]]{0,24}") {
        if let Ok(host) = Host::parse(&text) {
            prop_assert_eq!(Host::parse(&host.to_string()), Ok(host));
        }
        if let Ok(authority) = Authority::parse(&text) {
            prop_assert_eq!(Authority::parse(&authority.to_string()), Ok(authority));
        }
        if let Ok(pattern) = HostPattern::parse(&text) {
            prop_assert_eq!(HostPattern::parse(&pattern.to_string()), Ok(pattern));
        }
    }

    #[test]
    fn name_on_fast_path_is_unchanged_by_mapping(text in "[a-z0-9_.xn-]{0,30}") {
        if is_normalised(&text) {
            let mapped = map_name(&text);
            prop_assert_eq!(mapped.as_deref(), Ok(text.as_str()));
        }
    }

    #[test]
    fn parsed_name_contains_only_safe_characters(text in "\\PC{0,40}") {
        if let Ok(Host::Name(name)) = Host::parse(&text) {
            prop_assert!(name.as_str().bytes().all(
                |b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'_')
            ));
            prop_assert!(!name.as_str().ends_with('.') && !name.as_str().contains(".."));
        }
    }

    #[test]
    fn ipv4_address_in_every_notation_is_recognised(bits: u32, spelling in 0..6u8) {
        let [a, b, c, d] = bits.to_be_bytes();
        let text = match spelling {
            0 => format!("{bits}"),
            1 => format!("{bits:#x}"),
            2 => format!("0{bits:o}"),
            3 => format!("{a:#X}.0{b:o}.{}", bits & 0xffff),
            4 => format!("{a}.{}", bits & 0xff_ffff),
            _ => format!("[::ffff:{a}.{b}.{c}.{d}]"),
        };
        prop_assert_eq!(Host::parse(&text), Ok(Host::Ip(Ipv4Addr::from_bits(bits).into())));
    }

    #[test]
    fn address_with_embedded_ipv4_has_class_of_embedded(bits: u32) {
        let v4 = Ipv4Addr::from_bits(bits);
        let class = classify(v4.into());
        let low = u128::from(bits);
        for wrapped in [
            low | (0xffff << 32),
            low | (0xffff << 48),
            low | (0x64_ff9b << 96),
            (0x2002 << 112) | (low << 80),
        ] {
            prop_assert_eq!(classify(Ipv6Addr::from_bits(wrapped).into()), class);
        }
    }
}
